// MXFP8 codes back to BF16 GEMM factors: as they lie, or in the blocked order in which oneDNN multiplies weights.
//
// A BF16 value is used only where it is a normal number that equals its code; each function returns nonzero where
// some block is not so, and its output is then not to be used (the caller takes the FP32 path).
#include "mx_quantize.h"

namespace quaver {

constexpr int PANEL = 64;  // output features that oneDNN's blocked weights interleave

// E4M3 code -> BF16 bits at a scale: the code's exponent moves by the block's, subnormals are normalised.
// offset = (scale - 7) << 7, modulo 2^16.
static INLINE bf16 decode_element(uint16_t code, uint16_t offset) {
  uint16_t magnitude = code & 0x7f;
  uint16_t bits = (uint16_t)((magnitude << 4) + offset);
  // 4..7: (m - 4) << 5; 2, 3: one binade lower; 1: two
  uint16_t subnormal = (uint16_t)(magnitude >= 4   ? offset + ((magnitude - 4) << 5)
                                  : magnitude >= 2 ? offset - 128 + ((magnitude - 2) << 6)
                                                   : offset - 256);
  bits = magnitude < 8 ? subnormal : bits;
  bits = magnitude == 0 ? 0 : bits;
  bits = magnitude == 0x7f ? 0x7fc0 : bits;
  return (bf16)(bits | ((code & 0x80) << 8));
}

static INLINE uint32_t outside_bf16(uint32_t scale) {
  return (uint32_t)(scale != 0) & (uint32_t)(scale - FIRST_BF16_SCALE > LAST_BF16_SCALE - FIRST_BF16_SCALE);
}

static INLINE uint16_t offset_of(uint32_t scale) { return (uint16_t)((scale - 7u) << 7); }

// `n` codes of one row block. Returns nonzero if the values are not to be used.
static INLINE uint32_t decode_row(const uint8_t* __restrict codes, int n, uint32_t scale, bf16* __restrict out) {
  const uint16_t offset = offset_of(scale);
  if (__builtin_expect(n == BLOCK, 1)) {
    for (int j = 0; j < BLOCK; j++) out[j] = decode_element(codes[j], offset);
  } else {
    for (int j = 0; j < n; j++) out[j] = decode_element(codes[j], offset);
  }
  if (__builtin_expect(scale != 0, 1)) return outside_bf16(scale);
  uint32_t lost = 0;
  for (int j = 0; j < n; j++) lost |= (uint32_t)((codes[j] & 0x7fu) - 1u < E4M3_TWO - 1);
  return lost;
}

// One row of `width` columns, each with its own scale. `some_zero`: whether a scale byte is 0.
static INLINE uint32_t decode_columns(const uint8_t* __restrict codes, const uint8_t* __restrict scales,
                                      const uint16_t* __restrict offsets, int width, bool some_zero,
                                      bf16* __restrict out) {
  for (int j = 0; j < width; j++) out[j] = decode_element(codes[j], offsets[j]);
  if (__builtin_expect(!some_zero, 1)) return 0;
  uint32_t lost = 0;
  for (int j = 0; j < width; j++)
    lost |= (uint32_t)(scales[j] == 0) & (uint32_t)((codes[j] & 0x7fu) - 1u < E4M3_TWO - 1);
  return lost;
}

// What the scales of a tile's columns mean. Returns nonzero if one lies outside of BF16.
static INLINE uint32_t read_scales(const uint8_t* __restrict scales, int width, uint16_t* __restrict offsets,
                                   bool* some_zero) {
  uint32_t outside = 0, zero = 0;
  for (int j = 0; j < width; j++) {
    outside |= outside_bf16(scales[j]);
    zero |= (uint32_t)(scales[j] == 0);
    offsets[j] = offset_of(scales[j]);
  }
  *some_zero = zero != 0;
  return outside;
}

}  // namespace quaver

using namespace quaver;

// Row blocks: codes [rows, cols], scales [rows, ceil(cols / 32)] -> out [rows, cols].
QUAVER_API int quaver_mx_decode_rows(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols, bf16* out,
                                     int threads) {
  const int64_t blocks = (cols + BLOCK - 1) / BLOCK;
  uint32_t unsafe = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : unsafe) if (rows * cols > 32768)
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t c = b * BLOCK, at = r * cols + c;
      unsafe |= decode_row(codes + at, (int)std::min<int64_t>(BLOCK, cols - c), scales[r * blocks + b], out + at);
    }
  }
  return (int)unsafe;
}

// Column blocks that restart at each group (see quaver_mx_quantize): codes [rows, cols] -> out [rows, cols].
QUAVER_API int quaver_mx_decode_columns(const uint8_t* codes, const uint8_t* scales, int64_t cols, const int64_t* ends,
                                        int64_t groups, int64_t group_rows, bf16* out, int threads) {
  const std::vector<Span> spans = spans_of(ends, groups, group_rows);
  const int tile = tile_width(cols, (int64_t)spans.size(), threads);
  const int64_t tiles = (cols + tile - 1) / tile, work = (int64_t)spans.size() * tiles;
  uint32_t unsafe = 0;
#pragma omp parallel num_threads(threads) reduction(| : unsafe) if (work > 1 && work * tile > 1024)
  {
    std::vector<uint16_t> offsets(tile);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < work; t++) {
      const Span span = spans[t / tiles];
      const int64_t c0 = (t % tiles) * tile;
      const int width = (int)std::min<int64_t>(tile, cols - c0);
      const uint8_t* s = scales + (t / tiles) * cols + c0;
      bool some_zero;
      unsafe |= read_scales(s, width, offsets.data(), &some_zero);
      for (int r = 0; r < span.count; r++) {
        const int64_t at = (span.first + r) * cols + c0;
        unsafe |= decode_columns(codes + at, s, offsets.data(), width, some_zero, out + at);
      }
    }
  }
  return (int)unsafe;
}

// oneDNN's blocked weight of y = x w^T: [features / 64][contracted / 2][64][2]. `features` and `contracted` are
// multiples of 64; `batch` weights follow one another.

// Stored [features, contracted] in row blocks: pairs of codes are transposed, 64 rows at a time, then decoded.
QUAVER_API int quaver_mx_pack_rows(const uint8_t* codes, const uint8_t* scales, int64_t batch, int64_t features,
                                   int64_t contracted, bf16* out, int threads) {
  const int64_t blocks = contracted / BLOCK, panels = features / PANEL, work = batch * panels;
  uint32_t unsafe = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : unsafe) if (work > 1)
  for (int64_t p = 0; p < work; p++) {
    bf16* panel = out + p * PANEL * contracted;
    for (int64_t b = 0; b < blocks; b++) {
      alignas(64) uint16_t pairs[BLOCK / 2][PANEL], offsets[2 * PANEL];
      alignas(64) uint8_t row_scales[2 * PANEL];
      for (int r = 0; r < 2 * PANEL; r++) row_scales[r] = scales[(p * PANEL + r / 2) * blocks + b];
      bool some_zero;
      unsafe |= read_scales(row_scales, 2 * PANEL, offsets, &some_zero);
      for (int r = 0; r < PANEL; r += 8)
        for (int k = 0; k < BLOCK / 2; k += 8) {
          const uint8_t* from = codes + (p * PANEL + r) * contracted + b * BLOCK + 2 * k;
          transpose_8x8((const uint16_t*)from, contracted / 2, &pairs[k][r], PANEL);
        }
      for (int k = 0; k < BLOCK / 2; k++)
        unsafe |= decode_columns((const uint8_t*)pairs[k], row_scales, offsets, 2 * PANEL, some_zero,
                                 panel + (b * (BLOCK / 2) + k) * 2 * PANEL);
    }
  }
  return (int)unsafe;
}

// Stored [contracted, features] in column blocks: two rows are interleaved.
QUAVER_API int quaver_mx_pack_columns(const uint8_t* codes, const uint8_t* scales, int64_t batch, int64_t contracted,
                                      int64_t features, bf16* out, int threads) {
  const int64_t blocks = contracted / BLOCK, panels = features / PANEL, work = batch * blocks;
  uint32_t unsafe = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : unsafe) if (work > 1)
  for (int64_t t = 0; t < work; t++) {
    const int64_t w = t / blocks, b = t % blocks;
    const uint8_t* from = codes + (w * contracted + b * BLOCK) * features;
    uint32_t* weight = (uint32_t*)(out + w * contracted * features);
    for (int64_t p = 0; p < panels; p++) {
      const uint8_t* s = scales + t * features + p * PANEL;
      alignas(64) uint16_t offsets[PANEL];
      bool some_zero;
      unsafe |= read_scales(s, PANEL, offsets, &some_zero);
      uint32_t* to = weight + (p * contracted / 2 + b * (BLOCK / 2)) * PANEL;
      for (int k = 0; k < BLOCK / 2; k++) {
        alignas(64) bf16 even[PANEL], odd[PANEL];
        const uint8_t* row = from + 2 * k * features + p * PANEL;
        unsafe |= decode_columns(row, s, offsets, PANEL, some_zero, even);
        unsafe |= decode_columns(row + features, s, offsets, PANEL, some_zero, odd);
        for (int j = 0; j < PANEL; j++) to[k * PANEL + j] = (uint32_t)even[j] | ((uint32_t)odd[j] << 16);
      }
    }
  }
  return (int)unsafe;
}
