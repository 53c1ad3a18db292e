// 32 elements and their scale, or scales: MXFP8 codes and BF16 values of one block, or of 32 columns at one row.
//
// Elements that all lie in E4M3's normal range are rounded as 16-bit integers, with AVX512 in registers throughout;
// everything else takes exact FP32 arithmetic, lane by lane.
#pragma once

#include "bits.h"
#ifdef __SSE4_1__
#include <immintrin.h>
#endif

namespace quaver {

// E8M0 byte of a block whose largest magnitude has these BF16 bits (of FP32: cut with a sticky last bit).
// floor: floor(log2 amax) - 8; rceil: a mantissa above 1.75 carries into the exponent. `carry` is 0 or 0x1f.
static INLINE uint16_t scale_byte(uint16_t amax, uint16_t carry) {
  const uint16_t exponent = (uint16_t)((uint16_t)(amax + carry) >> 7);
  const uint16_t byte = (uint16_t)(exponent > 8 ? exponent - 8 : 0);
  return amax >= 0x7f80 ? (uint16_t)NAN_SCALE : byte;
}

// What a scale byte s means in BF16 patterns: the pattern below E4M3's smallest normal, 2^-6; that of 448; and the
// way from BF16's exponent to E4M3's.
static INLINE uint16_t below_normal(uint16_t s) { return (uint16_t)(((s - 6u) << 7) - 1u); }
static INLINE uint16_t largest_value(uint16_t s) { return (uint16_t)(((s + 8u) << 7) | 0x60u); }
static INLINE uint16_t code_offset(uint16_t s) { return (uint16_t)((s - 7u) << 3); }
static INLINE bool takes_patterns(uint16_t s) { return s >= FIRST_BF16_SCALE && s <= LAST_BF16_SCALE; }

// One scale for all lanes, out of arrays over a row's blocks: from memory a word is spread over a register in one step.
struct RowScale {
  const uint16_t *byte, *below_, *largest_, *offset_;
  bool plain;  // the 16-bit path may be tried

  INLINE uint16_t scale(int) const { return *byte; }
  INLINE uint16_t below(int) const { return *below_; }
  INLINE uint16_t largest(int) const { return *largest_; }
  INLINE uint16_t offset(int) const { return *offset_; }
#ifdef QUAVER_AVX512
  INLINE __m512i below() const { return _mm512_set1_epi16((short)*below_); }
  INLINE __m512i largest() const { return _mm512_set1_epi16((short)*largest_); }
  INLINE __m512i offset() const { return _mm512_set1_epi16((short)*offset_); }
#endif
};

// A scale for each lane, out of arrays over a tile's columns.
struct ColumnScale {
  const uint16_t *byte, *below_, *largest_, *offset_;
  bool plain;

  INLINE uint16_t scale(int j) const { return byte[j]; }
  INLINE uint16_t below(int j) const { return below_[j]; }
  INLINE uint16_t largest(int j) const { return largest_[j]; }
  INLINE uint16_t offset(int j) const { return offset_[j]; }
#ifdef QUAVER_AVX512
  INLINE __m512i below() const { return _mm512_loadu_si512(below_); }
  INLINE __m512i largest() const { return _mm512_loadu_si512(largest_); }
  INLINE __m512i offset() const { return _mm512_loadu_si512(offset_); }
#endif
};

// 32 BF16 patterns, rounded to three mantissa bits, nearest even, whatever their exponents: what the row and the
// column of an element share. `all_normal`: no nonzero element is below E4M3's normal range at this scale.
#ifdef QUAVER_AVX512
struct Rounded {
  __m512i x, less_one, kept, top, sign;  // |x| - 1; rounded |x|, and its exponent and three bits alone; sign as a code's

  INLINE explicit Rounded(const bf16* from) {
    x = _mm512_loadu_si512(from);
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    less_one = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi16(1));
    kept = _mm512_add_epi16(_mm512_add_epi16(magnitude, _mm512_set1_epi16(7)), odd);
    top = _mm512_srli_epi16(kept, 4);
    sign = _mm512_srli_epi16(x, 8);
  }
  template <class Scale>
  INLINE bool all_normal(const Scale& scale) const {
    return _mm512_cmplt_epu16_mask(less_one, scale.below()) == 0;
  }
  template <class Scale>
  INLINE void write(const Scale& scale, uint8_t* codes, bf16* values) const {
    if (codes) {  // the saturating subtraction keeps zero at zero; 448 is code 0x7e whatever the scale
      const __m512i code = _mm512_min_epu16(_mm512_subs_epu16(top, scale.offset()), _mm512_set1_epi16(0x7e));
      const __m512i with_sign = _mm512_ternarylogic_epi64(code, sign, _mm512_set1_epi16(0x80), 0xf8);  // code | (sign & 0x80)
      _mm256_storeu_si256((__m256i*)codes, _mm512_cvtepi16_epi8(with_sign));
    }
    if (values) {
      const __m512i limited = _mm512_min_epu16(_mm512_and_si512(kept, _mm512_set1_epi16((short)0xfff0)), scale.largest());
      const __m512i minus = _mm512_set1_epi16((short)0x8000);
      _mm512_storeu_si512(values, _mm512_ternarylogic_epi64(limited, x, minus, 0xf8));  // limited | (x & minus)
    }
  }
};
#else
struct Rounded {
  const bf16* x;
  uint16_t kept[BLOCK];

  INLINE explicit Rounded(const bf16* from) : x(from) {
    for (int j = 0; j < BLOCK; j++) {
      const uint16_t magnitude = from[j] & 0x7fff;
      kept[j] = (uint16_t)(magnitude + 7 + ((magnitude >> 4) & 1)) & 0xfff0;
    }
  }
  template <class Scale>
  INLINE bool all_normal(const Scale& scale) const {
    uint16_t lost = 0;
    for (int j = 0; j < BLOCK; j++) lost |= (uint16_t)((x[j] & 0x7fff) - 1) < scale.below(j) ? 0xffff : 0;
    return lost == 0;
  }
  template <class Scale>
  INLINE void write(const Scale& scale, uint8_t* __restrict codes, bf16* __restrict values) const {
    uint16_t limited[BLOCK];
    for (int j = 0; j < BLOCK; j++) limited[j] = kept[j] > scale.largest(j) ? scale.largest(j) : kept[j];
    if (codes)
      for (int j = 0; j < BLOCK; j++) {
        const uint16_t top = limited[j] >> 4, offset = scale.offset(j);
        codes[j] = (uint8_t)((top > offset ? top - offset : 0) | ((x[j] >> 8) & 0x80));  // zero stays zero
      }
    if (values)
      for (int j = 0; j < BLOCK; j++) values[j] = (bf16)(limited[j] | (x[j] & 0x8000));
  }
};
#endif

// Nonzero if a BF16 value of these lanes would not be a normal number that equals its code: the rule by which the
// reference codec refuses BF16, block by block.
template <class Scale>
static INLINE uint32_t not_bf16(const uint32_t* code, const Scale& scale) {
  uint32_t unsafe = 0;
  for (int j = 0; j < BLOCK; j++) {
    const uint32_t s = scale.scale(j), c = code[j] & 0x7fu;
    const uint32_t outside = (uint32_t)(s - FIRST_BF16_SCALE > LAST_BF16_SCALE - FIRST_BF16_SCALE) & (uint32_t)(s != 0);
    const uint32_t subnormal = (uint32_t)(s == 0) & (uint32_t)(c - 1 < E4M3_TWO - 1);
    unsafe |= outside | subnormal;
  }
  return unsafe;
}

// 32 lanes in exact FP32 arithmetic. Returns nonzero if the values are not to be used.
template <class Scale, class T>
__attribute__((noinline)) static uint32_t encode_exact(const T* __restrict x, const Scale& scale,
                                                       uint8_t* __restrict codes, bf16* __restrict values) {
  uint32_t code[BLOCK], value[BLOCK];
  for (int j = 0; j < BLOCK; j++) {
    const uint32_t word = word_of_element(x[j]), sign = word & 0x80000000u, s = scale.scale(j);
    float scaled = float_of(word ^ sign) * float_of((254u - s) << 23);
    scaled = scaled > 448.0f ? 448.0f : scaled;
    const uint32_t bits = word_of(scaled);
    const uint32_t normal = (bits + 0x7ffffu + ((bits >> 20) & 1u)) & 0xfff00000u;
    const float shifted = scaled + 16384.0f;  // 2^14: its unit in the last place is 2^-9, E4M3's smallest step
    const uint32_t below = bits < (121u << 23) ? ~0u : 0u;
    const uint32_t rounded = (below & word_of(shifted - 16384.0f)) | (~below & normal);
    const uint32_t c = (below & (word_of(shifted) - 0x46800000u)) | (~below & ((normal >> 20) - 960u));
    code[j] = s == NAN_SCALE ? 0u : c | (sign >> 24);
    const uint32_t v = (rounded >> 16) + ((s - 127u) << 7);
    value[j] = (rounded == 0 ? 0u : v) | (sign >> 16);
  }
  if (codes)
    for (int j = 0; j < BLOCK; j++) codes[j] = (uint8_t)code[j];
  if (!values) return 0;
  for (int j = 0; j < BLOCK; j++) values[j] = (bf16)value[j];
  return not_bf16(code, scale);
}

// Fewer than 32 lanes, through a zero-padded copy.
template <class Scale, class T>
static INLINE uint32_t encode_rest(const T* exact, int n, const Scale& scale, uint8_t* codes, bf16* values) {
  T padded[BLOCK] = {0};
  uint8_t padded_codes[BLOCK];
  bf16 padded_values[BLOCK];
  std::memcpy(padded, exact, n * sizeof(T));
  const uint32_t unsafe = encode_exact(padded, scale, padded_codes, padded_values);
  if (codes) std::memcpy(codes, padded_codes, n);
  if (values) std::memcpy(values, padded_values, n * sizeof(bf16));
  return unsafe;
}

#ifdef __SSE4_1__
// The largest of eight magnitudes. The one horizontal instruction is a minimum: 0x7fff - a is a ^ 0x7fff.
static INLINE uint16_t largest_lane(__m128i most) {
  return (uint16_t)(0x7fff - _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(0x7fff))), 0));
}
#endif
#ifdef QUAVER_AVX512
static INLINE uint16_t largest_lane(__m512i magnitude) {
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(magnitude), _mm512_extracti64x4_epi64(magnitude, 1));
  return largest_lane(_mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}
#endif

// The largest magnitude of up to 32 patterns.
static INLINE uint16_t largest_of(const bf16* __restrict x, int n) {
#ifdef __SSE4_1__
  if (__builtin_expect(n == BLOCK, 1)) {
    const __m128i mask = _mm_set1_epi16(0x7fff);
    const __m128i* lanes = (const __m128i*)x;
    const __m128i low = _mm_max_epu16(_mm_and_si128(_mm_loadu_si128(lanes), mask),
                                      _mm_and_si128(_mm_loadu_si128(lanes + 1), mask));
    const __m128i high = _mm_max_epu16(_mm_and_si128(_mm_loadu_si128(lanes + 2), mask),
                                       _mm_and_si128(_mm_loadu_si128(lanes + 3), mask));
    return largest_lane(_mm_max_epu16(low, high));
  }
#endif
  uint16_t amax = 0;
  for (int j = 0; j < n; j++) {
    const uint16_t magnitude = x[j] & 0x7fff;
    amax = magnitude > amax ? magnitude : amax;
  }
  return amax;
}

// FP32 words cut to BF16 patterns whose last bit also says whether anything was cut off. Such a pattern rounds to
// three mantissa bits as its word does, has its exponent, and exceeds 1.75 * 2^k where its word does.
static INLINE void cut_sticky(const uint32_t* __restrict words, int n, bf16* __restrict out) {
  for (int j = 0; j < n; j++) out[j] = (bf16)((words[j] >> 16) | ((words[j] & 0xffffu) != 0 ? 1u : 0u));
}

}  // namespace quaver
