// 32 elements and their scale: HiF8 codes and BF16 values, in registers of AVX512 throughout.
//
// Division: x times 1 / scale in two parts lies within one unit of the last place of the quotient; so its remainder is
// exact in a fused multiply-add, and adding that times the correctly rounded reciprocal rounds the quotient correctly
// (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990). This holds while nothing
// overflows or underflows: scales far from 1 and quotients far above HiF8 are left to the divider, and where a
// remainder underflows the quotient is so small that its code is 0 whatever its last bits.
//
// Coding: sign, exponent and mantissa of a quotient cut to 16 bits; within an exponent, codes are consecutive.
#pragma once

#include "hif8_codes.h"

#ifdef QUAVER_AVX512
namespace quaver {

constexpr float LEAST_SCALE = 0x1p-60f, MOST_SCALE = 0x1p60f;
constexpr uint16_t FAR_ABOVE = 227 << 7;  // BF16 bits of 2^100: quotients from here on are left to the divider

// By the last six bits of an exponent field: half of the last bit kept, bits to shift out, code of (field << 7) less
// what remains of it after the shift.
struct LaneTables {
  uint16_t half[64] = {}, shift[64] = {}, base[64] = {};

  LaneTables() {
    for (uint32_t field = HIF8_SMALLEST; field <= HIF8_LARGEST; field++) {
      const uint32_t dropped = dropped_bits(field) - 16, i = field & 63;
      half[i] = (uint16_t)(1u << (dropped - 1));
      shift[i] = (uint16_t)dropped;
      base[i] = (uint16_t)(encode_word(field << 23) - ((field << 7) >> dropped));
    }
  }
};

struct Lookup {
  __m512i low, high;
  INLINE explicit Lookup(const uint16_t* table)
      : low(_mm512_loadu_si512(table)), high(_mm512_loadu_si512(table + 32)) {}
  INLINE __m512i operator()(__m512i index) const { return _mm512_permutex2var_epi16(low, index, high); }
};

struct LaneEncoder {
  float scale;
  bool fits;  // the scale does
  __m512 scales, inverse, rest;  // 1 / scale, and what its rounding lost
  Lookup half, shift, base;

  INLINE LaneEncoder(float s, const LaneTables& t)
      : scale(s),
        fits(s >= LEAST_SCALE && s <= MOST_SCALE),
        scales(_mm512_set1_ps(s)),
        inverse(_mm512_set1_ps(1.0f / s)),
        rest(_mm512_mul_ps(_mm512_fnmadd_ps(inverse, scales, _mm512_set1_ps(1.0f)), inverse)),
        half(t.half),
        shift(t.shift),
        base(t.base) {}

  INLINE __m512i divided(__m512 x) const {
    const __m512 near = _mm512_fmadd_ps(x, inverse, _mm512_mul_ps(x, rest));
    return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_fnmadd_ps(near, scales, x), inverse, near));
  }
  // Upper halves of 32 quotients.
  INLINE __m512i quotients(const bf16* x) const {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u), pairs = _mm512_loadu_si512(x);
    const __m512i even = divided(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
    const __m512i odd = divided(_mm512_castsi512_ps(_mm512_and_si512(pairs, upper)));
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(even, 16), odd);
  }
  INLINE __m512i quotients(const uint32_t* x) const {
    const __m512i first = divided(_mm512_loadu_ps(x)), second = divided(_mm512_loadu_ps(x + 16));
    const __m512i odds = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                          25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(first, odds, second);
  }

  // Codes of 32 elements, and their values where wanted; nonzero where they are left to the divider instead. Without a
  // call in it, so that a loop around it keeps tables and constants in registers.
  template <bool VALUES, class T>
  INLINE __mmask32 encode(const T* x, uint8_t* codes, bf16* values) const {
    const __m512i quotient = quotients(x);
    __m512i magnitude = _mm512_and_si512(quotient, _mm512_set1_epi16(0x7fff));
    const __mmask32 far = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16((short)FAR_ABOVE));
    const __mmask32 some = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16((HIF8_SMALLEST - 1) << 7));
    magnitude = _mm512_max_epu16(magnitude, _mm512_set1_epi16(HIF8_SMALLEST << 7));
    magnitude = _mm512_min_epu16(magnitude, _mm512_set1_epi16((short)(HIF8_LARGEST << 7)));
    magnitude = _mm512_add_epi16(magnitude, half(_mm512_srli_epi16(magnitude, 7)));
    const __m512i field = _mm512_srli_epi16(magnitude, 7), bits = shift(field);
    const __m512i kept = _mm512_srlv_epi16(magnitude, bits);
    const __m512i sign = _mm512_and_si512(quotient, _mm512_set1_epi16((short)0x8000));
    const __m512i code = _mm512_or_si512(_mm512_add_epi16(kept, base(field)), _mm512_srli_epi16(sign, 8));
    _mm256_storeu_si256((__m256i*)codes, _mm512_cvtepi16_epi8(_mm512_maskz_mov_epi16(some, code)));
    if (VALUES) {
      const __m512i value = _mm512_or_si512(_mm512_sllv_epi16(kept, bits), sign);
      _mm512_storeu_si512(values, _mm512_maskz_mov_epi16(some, value));
    }
    return far;
  }
};

}  // namespace quaver
#endif
