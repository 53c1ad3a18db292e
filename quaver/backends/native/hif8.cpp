// HiF8: amax, codes of x / scale, and codes back to BF16.
//
// The top bits of the quotient x / scale decide a code: a table of 8,192 codes, made by integer arithmetic. BF16 input
// of some size takes a table over all its 65,536 patterns at the tensor's scale, made in the same way, and divides no
// more.
#include <vector>

#include "bits.h"
#ifdef QUAVER_AVX512
#include <immintrin.h>
#endif

namespace quaver {

constexpr int64_t CHUNK = 4096;           // elements of one piece of work
constexpr int64_t TABLE_FROM = 1 << 17;   // elements from which a table repays its building

// Nearest, ties away from zero; the size of the exponent eats mantissa bits. Finite overflow saturates at 2^15.
static uint32_t encode_word(uint32_t word) {
  const uint32_t magnitude = word & 0x7fffffffu, sign = (word >> 24) & 0x80u;
  if (magnitude > INF_WORD) return 0x80u;
  if (magnitude == INF_WORD) return 0x6fu | sign;
  if (magnitude >= 0x47200000u) return 0x6eu | sign;  // 40960: halfway to where 1.5 * 2^15 would be
  if (magnitude < (104u << 23)) return 0u;            // below 2^-23; there is no negative zero
  const int32_t exponent = (int32_t)(magnitude >> 23) - 127, size = exponent < 0 ? -exponent : exponent;
  const uint32_t dropped = 20u + (size > 3) + (size > 7) + (size > 15);
  uint32_t rounded = ((magnitude + (1u << (dropped - 1))) >> dropped) << dropped;
  if (magnitude < (105u << 23)) rounded = 105u << 23;  // [2^-23, 2^-22) goes to 2^-22, the smallest value
  const int32_t e = (int32_t)(rounded >> 23) - 127;
  const uint32_t mantissa = (rounded >> 20) & 7u, s = (uint32_t)(e < 0 ? -e : e), negative = e < 0 ? 1u : 0u;
  if (e < -15) return (uint32_t)(e + 23) | sign;
  if (s == 0) return 0x08u | mantissa | sign;
  if (s == 1) return 0x10u | negative << 3 | mantissa | sign;
  if (s < 4) return 0x20u | negative << 4 | (s - 2u) << 3 | mantissa | sign;
  if (s < 8) return 0x40u | negative << 4 | (s - 4u) << 2 | mantissa >> 1 | sign;
  return 0x60u | negative << 4 | (s - 8u) << 1 | mantissa >> 2 | sign;
}

// Rounding ties away from zero looks at one bit below the last mantissa bit: sign, exponent and four mantissa bits of
// a word decide its code. (A quotient that is NaN is a quiet one, whose first mantissa bit is set.)
static const uint8_t* codes_by_top_bits() {
  static const std::vector<uint8_t> table = [] {
    std::vector<uint8_t> codes(8192);
    for (uint32_t top = 0; top < 8192; top++) codes[top] = (uint8_t)encode_word(top << 19);
    return codes;
  }();
  return table.data();
}

SCALAR static void codes_of(const uint16_t* __restrict index, int64_t n, const uint8_t* __restrict table,
                            uint8_t* __restrict codes) {
  for (int64_t j = 0; j < n; j++) codes[j] = table[index[j]];
}

template <class T>
static INLINE void encode_chunk(const T* __restrict x, int64_t n, float scale, uint8_t* __restrict codes) {
  uint16_t top[CHUNK];
  for (int64_t j = 0; j < n; j++) top[j] = (uint16_t)(word_of(float_of(word_of_element(x[j])) / scale) >> 19);
  codes_of(top, n, codes_by_top_bits(), codes);
}

// table[codes[j]]. The 256 BF16 values fill eight registers of AVX512, which look up 64 of them at once.
#ifdef QUAVER_AVX512
static void values_of(const uint8_t* __restrict codes, int64_t n, const bf16* __restrict table,
                      bf16* __restrict values) {
  __m512i part[8];
  for (int i = 0; i < 8; i++) part[i] = _mm512_loadu_si512(table + 32 * i);
  for (int64_t j = 0; j < n; j += 32) {
    const __mmask32 lanes = n - j >= 32 ? ~0u : (1u << (n - j)) - 1u;
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(lanes, codes + j));
    const __mmask32 upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
    const __mmask32 negative = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x80));
    const __m512i low = _mm512_mask_blend_epi16(upper, _mm512_permutex2var_epi16(part[0], code, part[1]),
                                                _mm512_permutex2var_epi16(part[2], code, part[3]));
    const __m512i high = _mm512_mask_blend_epi16(upper, _mm512_permutex2var_epi16(part[4], code, part[5]),
                                                 _mm512_permutex2var_epi16(part[6], code, part[7]));
    _mm512_mask_storeu_epi16(values + j, lanes, _mm512_mask_blend_epi16(negative, low, high));
  }
}
#else
SCALAR static void values_of(const uint8_t* __restrict codes, int64_t n, const bf16* __restrict table,
                             bf16* __restrict values) {
  for (int64_t j = 0; j < n; j++) values[j] = table[codes[j]];
}
#endif

// Codes of all 65,536 BF16 patterns at a scale: negative ones have the quotients of positive ones, but for the sign.
static std::vector<uint8_t> codes_of_patterns(float scale) {
  std::vector<uint8_t> patterns(65536);
  const uint8_t* codes = codes_by_top_bits();
  for (uint32_t from = 0; from < 32768; from += CHUNK) {
    uint16_t top[CHUNK];
    for (uint32_t j = 0; j < CHUNK; j++) top[j] = (uint16_t)(word_of(float_of((from + j) << 16) / scale) >> 19);
    for (uint32_t j = 0; j < CHUNK; j++) {
      patterns[from + j] = codes[top[j]];
      patterns[32768 + from + j] = codes[top[j] ^ 0x1000];
    }
  }
  return patterns;
}

template <class T>
static void encode_tensor(const T* x, int64_t n, float scale, uint8_t* codes, bf16* values, const bf16* table,
                          int threads) {
  std::vector<uint8_t> patterns;
  if (sizeof(T) == sizeof(bf16) && n >= TABLE_FROM) patterns = codes_of_patterns(scale);
  const uint8_t* lookup = patterns.empty() ? nullptr : patterns.data();
#pragma omp parallel for schedule(static) num_threads(threads) if (n > 32768)
  for (int64_t c = 0; c < (n + CHUNK - 1) / CHUNK; c++) {
    const int64_t from = c * CHUNK, m = n - from < CHUNK ? n - from : CHUNK;
    uint8_t unwanted[CHUNK];
    uint8_t* to = codes ? codes + from : unwanted;
    if (lookup)
      codes_of((const bf16*)x + from, m, lookup, to);
    else
      encode_chunk(x + from, m, scale, to);
    if (values) values_of(to, m, table, values + from);
  }
}

template <class T>
static uint32_t amax_word(const T* x, int64_t n, int threads) {
  int32_t amax = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(max : amax) if (n > 32768)
  for (int64_t c = 0; c < (n + CHUNK - 1) / CHUNK; c++) {
    const int64_t from = c * CHUNK, m = n - from < CHUNK ? n - from : CHUNK;
    int32_t most = 0;
    for (int64_t j = 0; j < m; j++) {
      int32_t magnitude = (int32_t)(word_of_element(x[from + j]) & 0x7fffffffu);
      most = magnitude > most ? magnitude : most;
    }
    amax = most > amax ? most : amax;
  }
  return (uint32_t)amax;
}

}  // namespace quaver

using namespace quaver;

// Largest magnitudes of `batch` pieces of n elements each; NaN if there is one.
QUAVER_API void quaver_amax(const void* x, int is_fp32, int64_t batch, int64_t n, float* out, int threads) {
  for (int64_t b = 0; b < batch; b++)
    out[b] = float_of(is_fp32 ? amax_word((const uint32_t*)x + b * n, n, threads)
                              : amax_word((const bf16*)x + b * n, n, threads));
}

// Dequantisation scales of `batch` pieces: amax / format_max where that is finite and above 0, else 1.
QUAVER_API void quaver_hif8_scales(const void* x, int is_fp32, int64_t batch, int64_t n, float format_max, float* out,
                                   int threads) {
  quaver_amax(x, is_fp32, batch, n, out, threads);
  for (int64_t b = 0; b < batch; b++) {
    const float quotient = out[b] / format_max;
    out[b] = quotient > 0.0f && word_of(quotient) < INF_WORD ? quotient : 1.0f;
  }
}

// Codes of `batch` pieces of n elements, each with its FP32 scale, and the codes' BF16 values by `table`; a null
// pointer is not wanted.
QUAVER_API void quaver_hif8_encode(const void* x, int is_fp32, int64_t batch, int64_t n, const float* scales,
                                   uint8_t* codes, bf16* values, const bf16* table, int threads) {
  for (int64_t b = 0; b < batch; b++) {
    bf16* to = values ? values + b * n : nullptr;
    if (is_fp32)
      encode_tensor((const uint32_t*)x + b * n, n, scales[b], codes ? codes + b * n : nullptr, to, table, threads);
    else
      encode_tensor((const bf16*)x + b * n, n, scales[b], codes ? codes + b * n : nullptr, to, table, threads);
  }
}

QUAVER_API void quaver_hif8_decode(const uint8_t* codes, int64_t n, const bf16* table, bf16* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n > 32768)
  for (int64_t c = 0; c < (n + CHUNK - 1) / CHUNK; c++) {
    const int64_t from = c * CHUNK;
    values_of(codes + from, n - from < CHUNK ? n - from : CHUNK, table, out + from);
  }
}

// codes [batch, rows, cols] -> out [batch, cols, rows].
QUAVER_API void quaver_hif8_decode_transposed(const uint8_t* codes, int64_t batch, int64_t rows, int64_t cols,
                                              const bf16* table, bf16* out, int threads) {
  constexpr int TALL = 256, WIDE = 32;  // long runs of writes
  const int64_t down = (rows + TALL - 1) / TALL;
#pragma omp parallel for schedule(static) num_threads(threads) if (batch * rows * cols > 32768)
  for (int64_t t = 0; t < batch * down; t++) {
    const int64_t r0 = (t % down) * TALL;
    const int height = (int)(rows - r0 < TALL ? rows - r0 : TALL);
    const uint8_t* from = codes + (t / down) * rows * cols;
    bf16* to = out + (t / down) * rows * cols;
    for (int64_t c0 = 0; c0 < cols; c0 += WIDE) {
      const int width = (int)(cols - c0 < WIDE ? cols - c0 : WIDE);
      bf16 tile[TALL][WIDE];
      for (int r = 0; r < height; r++) values_of(from + (r0 + r) * cols + c0, width, table, tile[r]);
      if (height % 8 == 0 && width % 8 == 0) {
        for (int c = 0; c < width; c += 8)
          for (int r = 0; r < height; r += 8) transpose_8x8(&tile[r][c], WIDE, to + (c0 + c) * rows + r0 + r, rows);
      } else {
        for (int c = 0; c < width; c++)
          for (int r = 0; r < height; r++) to[(c0 + c) * rows + r0 + r] = tile[r][c];
      }
    }
  }
}
