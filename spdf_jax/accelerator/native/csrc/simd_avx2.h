// SPDX-License-Identifier: Apache-2.0
// Vectors of 8 floats, with AVX2 and FMA.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

// The inner namespace is unnamed, so that each set of kernels has its own
// functions.
namespace simd {
namespace {

using Vector = __m256;
constexpr int kWidth = 8;
constexpr int kForwardVectors = 8;
constexpr int kBackwardVectors = 4;

inline Vector Zero() { return _mm256_setzero_ps(); }
inline Vector Load(const float* p) { return _mm256_load_ps(p); }
inline void Store(float* p, Vector v) { _mm256_store_ps(p, v); }
inline void Stream(float* p, Vector v) { _mm256_stream_ps(p, v); }
inline void Fence() { _mm_sfence(); }
// Loads into a register, which prevents the compiler from loading twice.
inline Vector LoadOnce(const float* p) {
  Vector v = Load(p);
  asm("" : "+x"(v));
  return v;
}
inline Vector Add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector Multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector MultiplyAdd(Vector a, Vector b, Vector c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline Vector Broadcast(const float* p) { return _mm256_broadcast_ss(p); }
inline Vector BroadcastLoad(const float* p) { return Broadcast(p); }

inline __m256i Lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline Vector LoadFirst(const float* p, int n) {
  return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n),
                                                  Lanes()));
}
inline void StoreFirst(float* p, Vector v, int n) {
  // Masked stores of whole vectors are slow before AVX-512 on AMD.
  if (n == kWidth) return _mm256_storeu_ps(p, v);
  _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), Lanes()), v);
}

inline void Transpose(Vector* r) {
  Vector t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

inline Vector SumLanes(const Vector* r) {
  const Vector a = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]),
                                  _mm256_hadd_ps(r[2], r[3]));
  const Vector b = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]),
                                  _mm256_hadd_ps(r[6], r[7]));
  return Add(_mm256_permute2f128_ps(a, b, 0x20),
             _mm256_permute2f128_ps(a, b, 0x31));
}

// For every set of lanes, its members in order, a byte each.
struct Members {
  uint64_t of[1 << kWidth];
};

constexpr Members ListMembers() {
  Members members = {};
  for (uint32_t bits = 0; bits < 1 << kWidth; ++bits) {
    int n = 0;
    for (uint64_t i = 0; i < kWidth; ++i) {
      if (bits >> i & 1) members.of[bits] |= i << 8 * n++;
    }
  }
  return members;
}

inline int Compress(Vector v, uint32_t bits, int first, float* values,
                    uint16_t* indices) {
  static constexpr Members kMembers = ListMembers();
  const __m128i members = _mm_loadl_epi64(
      reinterpret_cast<const __m128i*>(kMembers.of + bits));
  _mm256_storeu_ps(values, _mm256_permutevar8x32_ps(
                               v, _mm256_cvtepu8_epi32(members)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(indices),
                   _mm_add_epi16(_mm_set1_epi16(static_cast<int16_t>(first)),
                                 _mm_cvtepu8_epi16(members)));
  return __builtin_popcount(bits);
}

inline uint32_t NonZero(const uint8_t* p, int n) {
  uint64_t bytes = 0;
  std::memcpy(&bytes, p, n);
  const __m128i zero = _mm_cmpeq_epi8(_mm_cvtsi64_si128(bytes),
                                      _mm_setzero_si128());
  return ~_mm_movemask_epi8(zero) & 0xff;
}

inline Vector Keep(uint32_t bits, Vector v) {
  const __m256i bit = _mm256_sllv_epi32(_mm256_set1_epi32(1), Lanes());
  const __m256i kept = _mm256_and_si256(_mm256_set1_epi32(bits), bit);
  return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(kept, bit)), v);
}

}  // namespace
}  // namespace simd
