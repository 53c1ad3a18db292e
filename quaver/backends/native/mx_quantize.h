// MXFP8 quantisation of tiles: 32 rows by some columns are read once and give row blocks, column blocks, or both.
//
// A row block runs along a row (1 x 32), a column block down a column (32 x 1). Of each, codes, E8M0 scales and the
// dequantised BF16 values are written where wanted. Tiles are as wide as the second-level cache allows: along whole
// rows the processor fetches ahead, over narrow tiles of many rows it does not, and twice the time goes by.
#pragma once

#include <algorithm>
#include <vector>

#include "mx_lanes.h"

namespace quaver {

constexpr int TILE = 4096;  // most columns of a tile: 256 KiB of BF16

// Columns of a tile, a multiple of 32: all, or an even part, and narrower where threads would find no work.
static inline int tile_width(int64_t cols, int64_t spans, int threads) {
  int64_t tiles = (cols + TILE - 1) / TILE;
  while (spans * tiles < 2 * threads && cols / tiles > 512) tiles++;
  const int64_t width = (cols + tiles - 1) / std::max<int64_t>(tiles, 1);
  return (int)((width + BLOCK - 1) / BLOCK * BLOCK);
}

// Where one direction's results go; a null pointer is not wanted. `values` implies a flag: see `quantize`.
struct Output {
  uint8_t* codes;
  uint8_t* scales;
  bf16* values;
  bool wanted() const { return codes != nullptr || values != nullptr; }
  INLINE uint8_t* codes_at(int64_t at) const { return codes ? codes + at : nullptr; }
  INLINE bf16* values_at(int64_t at) const { return values ? values + at : nullptr; }
};

// One row into the maxima of a tile's columns; a call a row keeps compilers from walking down the columns instead.
__attribute__((noinline)) static void raise_maxima(uint16_t* __restrict amax, const bf16* __restrict row, int width) {
  for (int j = 0; j < width; j++) {
    const uint16_t magnitude = row[j] & 0x7fff;
    amax[j] = magnitude > amax[j] ? magnitude : amax[j];
  }
}

// The scales of a tile's columns, in memory of a thread.
struct ColumnScales {
  std::vector<uint16_t> amax, byte, below, largest, offset;
  std::vector<uint8_t> plain;

  explicit ColumnScales(int width)
      : amax(width), byte(width), below(width), largest(width), offset(width), plain(width / BLOCK) {}

  void set(const bf16* const* rows, int count, int width, uint16_t carry) {
    std::fill(amax.begin(), amax.end(), 0);
    for (int r = 0; r < count; r++) raise_maxima(amax.data(), rows[r], width);
    spread(amax.data(), (int)amax.size(), carry, byte.data(), below.data(), largest.data(), offset.data());
    for (size_t c = 0; c < plain.size(); c++) {
      uint16_t outside = 0;
      for (int j = 0; j < BLOCK; j++) outside |= takes_patterns(byte[c * BLOCK + j]) ? 0 : 1;
      plain[c] = !outside;
    }
  }
  static void spread(const uint16_t* __restrict amax, int n, uint16_t carry, uint16_t* __restrict byte,
                     uint16_t* __restrict below, uint16_t* __restrict largest, uint16_t* __restrict offset) {
    for (int j = 0; j < n; j++) {
      const uint16_t s = scale_byte(amax[j], carry);
      byte[j] = s;
      below[j] = below_normal(s);
      largest[j] = largest_value(s);
      offset[j] = code_offset(s);
    }
  }
  INLINE ColumnScale from(int c) const {
    return ColumnScale{byte.data() + c, below.data() + c, largest.data() + c, offset.data() + c, plain[c / BLOCK] != 0};
  }
};

// The rows of one column block.
struct Span {
  int64_t first;
  int count;
};

// Column blocks that restart at each group. With `ends` (cumulative) groups differ, else all have `group_rows`.
static inline std::vector<Span> spans_of(const int64_t* ends, int64_t groups, int64_t group_rows) {
  std::vector<Span> spans;
  int64_t start = 0;
  for (int64_t g = 0; g < groups; g++) {
    int64_t end = ends ? ends[g] : start + group_rows;
    for (int64_t row = start; row < end; row += BLOCK)
      spans.push_back(Span{row, (int)std::min<int64_t>(BLOCK, end - row)});
    start = end;
  }
  return spans;
}

// Quantises [rows, cols]. `Source` gives rows of a tile: `row(r, first column, width, buffer)` answers a pointer to
// `width` elements, either its own or the buffer that it has filled. Returns a set of flags: 1, or 2, if the row,
// or the column, values are not to be used.
template <class T, class Source>
static int quantize(const Source& source, int64_t cols, const std::vector<Span>& spans, const Output& row_out,
                    const Output& col_out, bool rceil, int threads) {
  const int tile = tile_width(cols, (int64_t)spans.size(), threads);
  const int64_t tiles = (cols + tile - 1) / tile, row_blocks = (cols + BLOCK - 1) / BLOCK;
  const int64_t work = (int64_t)spans.size() * tiles;
  const uint16_t carry = rceil ? 0x1f : 0;
  uint32_t flags = 0;
#pragma omp parallel num_threads(threads) reduction(| : flags) if (work > 1 && work * tile > 1024)
  {
    std::vector<T> computed(Source::computed ? BLOCK * tile : 0);
    std::vector<bf16> cut(sizeof(T) == 4 ? BLOCK * tile : 0);
    ColumnScales scales(tile);
    const Output row = row_out, col = col_out;
    const bool rows_wanted = row.wanted(), cols_wanted = col.wanted();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < work; t++) {
      const Span span = spans[t / tiles];
      const int64_t c0 = (t % tiles) * tile;
      const int width = (int)std::min<int64_t>(tile, cols - c0);
      const T* exact[BLOCK];
      const bf16* lines[BLOCK];
      for (int r = 0; r < span.count; r++) {
        exact[r] = source.row(span.first + r, c0, width, computed.data() + (Source::computed ? r * tile : 0));
        lines[r] = sizeof(T) == 4 ? cut.data() + r * tile : (const bf16*)exact[r];
        if (sizeof(T) == 4) cut_sticky((const uint32_t*)exact[r], width, cut.data() + r * tile);
      }
      if (cols_wanted) {
        scales.set(lines, span.count, width, carry);
        uint8_t* out = col.scales + (t / tiles) * cols + c0;
        for (int j = 0; j < width; j++) out[j] = (uint8_t)scales.byte[j];
      }
      for (int r = 0; r < span.count; r++) {
        const int64_t at = (span.first + r) * cols + c0;
        uint8_t* row_scales = row.scales + (span.first + r) * row_blocks + c0 / BLOCK;
        for (int c = 0; c < width; c += BLOCK) {
          const int n = std::min(BLOCK, width - c);
          const bf16* x = lines[r] + c;
          const T* e = exact[r] + c;
          const RowScale scale(rows_wanted ? scale_byte(largest_of(x, n), carry) : 0);
          if (rows_wanted) row_scales[c / BLOCK] = (uint8_t)scale.byte;
          if (__builtin_expect(n == BLOCK, 1)) {
            const Rounded rounded(x);
            if (cols_wanted)
              flags |= encode(rounded, e, scales.from(c), col.codes_at(at + c), col.values_at(at + c)) << 1;
            if (rows_wanted) flags |= encode(rounded, e, scale, row.codes_at(at + c), row.values_at(at + c));
          } else {
            if (cols_wanted)
              flags |= encode_rest(e, n, scales.from(c), col.codes_at(at + c), col.values_at(at + c)) << 1;
            if (rows_wanted) flags |= encode_rest(e, n, scale, row.codes_at(at + c), row.values_at(at + c));
          }
        }
      }
    }
  }
  return (int)flags;
}

}  // namespace quaver
