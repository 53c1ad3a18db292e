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
  INLINE Output at(int64_t at) const { return Output{codes_at(at), scales, values_at(at)}; }
};

// The maxima of a row's blocks into `blocks`, and of its columns into `columns`; a null pointer is not wanted. A call a
// row keeps compilers from walking down the columns instead.
__attribute__((noinline)) static void find_maxima(const bf16* __restrict row, int width, uint16_t* __restrict columns,
                                                  uint16_t* __restrict blocks) {
  int c = 0;
#ifdef QUAVER_AVX512
  for (; c + BLOCK <= width; c += BLOCK) {
    const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(row + c), _mm512_set1_epi16(0x7fff));
    if (columns) _mm512_storeu_si512(columns + c, _mm512_max_epu16(magnitude, _mm512_loadu_si512(columns + c)));
    if (blocks) blocks[c / BLOCK] = largest_lane(magnitude);
  }
#endif
  for (; c < width; c += BLOCK) {
    const int n = std::min(BLOCK, width - c);
    if (blocks) blocks[c / BLOCK] = largest_of(row + c, n);
    if (columns)
      for (int j = c; j < c + n; j++) {
        const uint16_t magnitude = row[j] & 0x7fff;
        columns[j] = magnitude > columns[j] ? magnitude : columns[j];
      }
  }
}

// The scales of many blocks and what they mean, in memory of a thread; `plain` is one of BLOCK blocks, or of each.
struct Scales {
  std::vector<uint16_t> amax, byte, below, largest, offset, plain;

  explicit Scales(int count) : amax(count), byte(count), below(count), largest(count), offset(count), plain(count) {}

  void set(const uint16_t* of, int n, uint16_t carry) {
    spread(of, n, carry, byte.data(), below.data(), largest.data(), offset.data(), plain.data());
  }
  static void spread(const uint16_t* __restrict amax, int n, uint16_t carry, uint16_t* __restrict byte,
                     uint16_t* __restrict below, uint16_t* __restrict largest, uint16_t* __restrict offset,
                     uint16_t* __restrict plain) {
    for (int j = 0; j < n; j++) {
      const uint16_t s = scale_byte(amax[j], carry);
      byte[j] = s;
      below[j] = below_normal(s);
      largest[j] = largest_value(s);
      offset[j] = code_offset(s);
      plain[j] = takes_patterns(s);
    }
  }
  INLINE RowScale at(int block) const {
    return RowScale{byte.data() + block, below.data() + block, largest.data() + block, offset.data() + block,
                    plain[block] != 0};
  }
  // Of BLOCK columns from c on; `plain[c / BLOCK]` holds for all of them once `join` has run.
  INLINE ColumnScale from(int c) const {
    return ColumnScale{byte.data() + c, below.data() + c, largest.data() + c, offset.data() + c, plain[c / BLOCK] != 0};
  }
  void join() {
    for (size_t c = 0; c < plain.size() / BLOCK; c++) {
      uint16_t all = 1;
      for (int j = 0; j < BLOCK; j++) all &= plain[c * BLOCK + j];
      plain[c] = all;
    }
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

// How many blocks of a row the quicker way was not right for, by row and by column.
struct Left {
  int rows, cols;
};

// One row of a tile, whole blocks of it: codes and values of the row's blocks and of the columns', the quicker way. The
// numbers of blocks that this way is not right for go to `left_rows` and `left_cols`. There is no call in the loop, so
// that constants stay in registers; `next_row` of `source` (none: -1) is fetched meanwhile.
template <class Source>
__attribute__((noinline)) static Left encode_row(const bf16* __restrict line, int blocks, const Scales* rows,
                                                 const Scales* columns, const Output row, const Output col,
                                                 const Source& source, int64_t next_row, int64_t next_c0, int64_t cols,
                                                 uint16_t* __restrict left_rows, uint16_t* __restrict left_cols) {
  Left left = {0, 0};
  for (int b = 0; b < blocks; b++) {
    const int c = b * BLOCK;
    if (next_row >= 0 && next_c0 + c < cols) source.fetch(next_row, next_c0 + c);
    const Rounded rounded(line + c);
    if (columns) {
      const ColumnScale scale = columns->from(c);
      rounded.write(scale, col.codes_at(c), col.values_at(c));
      left_cols[left.cols] = (uint16_t)b;
      left.cols += !(scale.plain & rounded.all_normal(scale));
    }
    if (rows) {
      const RowScale scale = rows->at(b);
      rounded.write(scale, row.codes_at(c), row.values_at(c));
      left_rows[left.rows] = (uint16_t)b;
      left.rows += !(scale.plain & rounded.all_normal(scale));
    }
  }
  return left;
}

// Quantises [rows, cols]. `Source` gives rows of a tile: `row(r, first column, width, buffer)` answers a pointer to
// `width` elements, either its own or the buffer that it has filled; `fetch(r, c)` asks for the memory behind 32
// elements of the next tile while this one is coded, so that they are there by then. Returns a set of flags: 1, or 2, if the row,
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
    const int blocks = tile / BLOCK;
    Scales columns(tile), block_scales(blocks);
    std::vector<uint16_t> row_amax(BLOCK * blocks), left(2 * (blocks + 1));
    uint16_t *left_rows = left.data(), *left_cols = left_rows + blocks + 1;
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
      if (cols_wanted) std::fill(columns.amax.begin(), columns.amax.end(), 0);
      for (int r = 0; r < span.count; r++)
        find_maxima(lines[r], width, cols_wanted ? columns.amax.data() : nullptr,
                    rows_wanted ? row_amax.data() + r * blocks : nullptr);
      if (cols_wanted) {
        columns.set(columns.amax.data(), tile, carry);
        columns.join();
        uint8_t* out = col.scales + (t / tiles) * cols + c0;
        for (int j = 0; j < width; j++) out[j] = (uint8_t)columns.byte[j];
      }
      const int row_count = (width + BLOCK - 1) / BLOCK;
      const Span next = t + 1 < work ? spans[(t + 1) / tiles] : Span{0, 0};
      const int64_t next_c0 = ((t + 1) % tiles) * tile;
      for (int r = 0; r < span.count; r++) {
        const int64_t at = (span.first + r) * cols + c0;
        if (rows_wanted) {
          block_scales.set(row_amax.data() + r * blocks, row_count, carry);
          uint8_t* row_scales = row.scales + (span.first + r) * row_blocks + c0 / BLOCK;
          for (int c = 0; c < row_count; c++) row_scales[c] = (uint8_t)block_scales.byte[c];
        }
        const int whole = width / BLOCK, rest = width - whole * BLOCK;
        const Left many = encode_row(lines[r], whole, rows_wanted ? &block_scales : nullptr,
                                     cols_wanted ? &columns : nullptr, row.at(at), col.at(at), source,
                                     r < next.count ? next.first + r : -1, next_c0, cols, left_rows, left_cols);
        for (int i = 0; i < many.rows; i++) {
          const int c = left_rows[i] * BLOCK;
          flags |= encode_exact(exact[r] + c, block_scales.at(left_rows[i]), row.codes_at(at + c), row.values_at(at + c));
        }
        for (int i = 0; i < many.cols; i++) {
          const int c = left_cols[i] * BLOCK;
          flags |= encode_exact(exact[r] + c, columns.from(c), col.codes_at(at + c), col.values_at(at + c)) << 1;
        }
        if (rest) {
          const int c = whole * BLOCK;
          const T* e = exact[r] + c;
          if (cols_wanted) flags |= encode_rest(e, rest, columns.from(c), col.codes_at(at + c), col.values_at(at + c)) << 1;
          if (rows_wanted) flags |= encode_rest(e, rest, block_scales.at(whole), row.codes_at(at + c), row.values_at(at + c));
        }
      }
    }
  }
  return (int)flags;
}

}  // namespace quaver
