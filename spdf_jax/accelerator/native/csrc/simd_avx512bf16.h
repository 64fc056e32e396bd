// SPDX-License-Identifier: Apache-2.0
// Vectors of bfloat16 with AVX-512 BF16, in addition to those of AVX-512.
#pragma once
#include "kernels.h"
#include "simd_avx512.h"

namespace simd {
namespace {

using spdf::Bfloat16;

using Pairs = __m512i;  // 32 bfloat16: two in every 32-bit lane.

inline __mmask32 First(int n) {
  return static_cast<__mmask32>((uint64_t{1} << n) - 1);
}
inline Pairs NoPairs() { return _mm512_setzero_si512(); }
inline Pairs LoadPairs(const Bfloat16* p) { return _mm512_load_si512(p); }
// Loads into a register, which prevents the compiler from loading twice.
inline Pairs LoadPairsOnce(const Bfloat16* p) {
  Pairs v = LoadPairs(p);
  asm("" : "+v"(v));
  return v;
}
inline void StorePairs(Bfloat16* p, Pairs v) { _mm512_store_si512(p, v); }
inline Pairs LoadFirstPairs(const Bfloat16* p, int n) {
  return _mm512_maskz_loadu_epi16(First(n), p);
}
inline void StoreFirstPairs(Bfloat16* p, Pairs v, int n) {
  _mm512_mask_storeu_epi16(p, First(n), v);
}
// Non-temporal store; unordered until the fence.
inline void StreamPairs(Bfloat16* p, Pairs v) {
  _mm512_stream_si512(reinterpret_cast<Pairs*>(p), v);
}

// Broadcasts two bfloat16 to all lanes, through an integer register.
inline Pairs BroadcastPair(const Bfloat16* p) {
  return _mm512_castps_si512(Broadcast(reinterpret_cast<const float*>(p)));
}

// sum + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] in lane i.
inline Vector AddProducts(Pairs a, Pairs b, Vector sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Interleaves a and b to pairs (a[i], b[i]), in every 128-bit lane: the low 4,
// or the high 4, of its 8 elements.
inline Pairs InterleaveLow(Pairs a, Pairs b) {
  return _mm512_unpacklo_epi16(a, b);
}
inline Pairs InterleaveHigh(Pairs a, Pairs b) {
  return _mm512_unpackhi_epi16(a, b);
}

// Concatenates the first (second) elements of the pairs of a and of b.
inline Pairs Firsts(Pairs a, Pairs b) {
  return _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm512_cvtepi32_epi16(a)),
      _mm512_cvtepi32_epi16(b), 1);
}
inline Pairs Seconds(Pairs a, Pairs b) {
  return Firsts(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16));
}

// Rounds two vectors of 16 floats to the nearest bfloat16, ties to even.
inline Pairs Round(Vector a, Vector b) {
  return (Pairs)_mm512_cvtne2ps_pbh(b, a);
}

// Transposes 16 x 16 pairs in place.
inline void TransposePairs(Pairs* r) {
  Vector t[kWidth];
  for (int i = 0; i < kWidth; ++i) t[i] = _mm512_castsi512_ps(r[i]);
  Transpose(t);
  for (int i = 0; i < kWidth; ++i) r[i] = _mm512_castps_si512(t[i]);
}

// Conversions between bfloat16 and vectors of floats, for lists and gradients.

inline Vector LoadFirst(const Bfloat16* p, int n) {
  const __m256i bits = _mm256_maskz_loadu_epi16(First(n), p);
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void StoreFirst(Bfloat16* p, Vector v, int n) {
  _mm256_mask_storeu_epi16(p, First(n), (__m256i)_mm512_cvtneps_pbh(v));
}
// Compresses as for floats. v must be exact in bfloat16, so that its lower half
// can hold the index.
inline int Compress(Vector v, uint32_t bits, int first, Bfloat16* values,
                    uint16_t* indices) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                                          12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
  const __m512i both = _mm512_maskz_compress_epi32(
      static_cast<__mmask16>(bits),
      _mm512_or_si512(_mm512_castps_si512(v), index));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices),
                      _mm512_cvtepi32_epi16(both));
  return __builtin_popcount(bits & 0xffff);
}

}  // namespace
}  // namespace simd
