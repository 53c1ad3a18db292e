// HiF8 codes out of quotients x / scale, and BF16 values out of codes, at any instruction set.
//
// The top bits of a quotient decide its code: a table of 8,192 codes, made by integer arithmetic.
#pragma once

#include <vector>

#include "bits.h"
#ifdef QUAVER_AVX512
#include <immintrin.h>
#endif

namespace quaver {

constexpr int64_t CHUNK = 4096;  // elements of one piece of work

constexpr uint32_t HIF8_SMALLEST = 105;  // exponent field of 2^-22, the smallest value; half of it rounds up to it
constexpr uint32_t HIF8_LARGEST = 142;   // of 2^15, the largest one

// Mantissa bits of FP32 that a quotient of this exponent field loses: the size of the exponent eats them.
static INLINE uint32_t dropped_bits(uint32_t field) {
  const uint32_t size = field < 127 ? 127 - field : field - 127;
  return 20u + (size > 3) + (size > 7) + (size > 15);
}

// Nearest, ties away from zero. Finite overflow saturates at 2^15.
static uint32_t encode_word(uint32_t word) {
  const uint32_t magnitude = word & 0x7fffffffu, sign = (word >> 24) & 0x80u;
  if (magnitude > INF_WORD) return 0x80u;
  if (magnitude == INF_WORD) return 0x6fu | sign;
  if (magnitude >= 0x47200000u) return 0x6eu | sign;  // 40960: halfway to where 1.5 * 2^15 would be
  if (magnitude < ((HIF8_SMALLEST - 1) << 23)) return 0u;  // below 2^-23; there is no negative zero
  const uint32_t dropped = dropped_bits(magnitude >> 23);
  uint32_t rounded = ((magnitude + (1u << (dropped - 1))) >> dropped) << dropped;
  if (magnitude < (HIF8_SMALLEST << 23)) rounded = HIF8_SMALLEST << 23;
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

// At most CHUNK elements, divided one by one.
template <class T>
static INLINE void encode_divided(const T* __restrict x, int64_t n, float scale, uint8_t* __restrict codes) {
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

}  // namespace quaver
