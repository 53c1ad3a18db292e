// BF16 to FP32 past the caches: a weight's gradient is large and not read again soon, so its lines need not be
// fetched before they are overwritten.
#include "bits.h"
#ifdef QUAVER_AVX512
#include <immintrin.h>
#endif

using namespace quaver;

// x [n] -> out [n]; `out` is aligned to 64 bytes.
QUAVER_API void quaver_widen(const bf16* x, int64_t n, uint32_t* out, int threads) {
  constexpr int64_t PART = 16384;
  const int64_t parts = (n + PART - 1) / PART;
#pragma omp parallel for schedule(static) num_threads(threads) if (parts > 1)
  for (int64_t part = 0; part < parts; part++) {
    int64_t i = part * PART;
    const int64_t end = i + PART < n ? i + PART : n;
#ifdef QUAVER_AVX512
    for (; i + 16 <= end; i += 16) {
      const __m512i word = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(x + i)));
      _mm512_stream_si512((__m512i*)(out + i), _mm512_slli_epi32(word, 16));
    }
    _mm_sfence();
#endif
    for (; i < end; i++) out[i] = (uint32_t)x[i] << 16;
  }
}
