// SPDX-License-Identifier: Apache-2.0
// Vectors of 16 floats, with AVX-512 F, BW, DQ and VL.
#pragma once
#include <immintrin.h>

#include <cstdint>

// The inner namespace is unnamed, so that each set of kernels has its own
// functions.
namespace simd {
namespace {

using Vector = __m512;
constexpr int kWidth = 16;
constexpr int kForwardVectors = 8;   // Registers for sums.
constexpr int kBackwardVectors = 8;  // Registers for x, and for dx.

inline Vector Zero() { return _mm512_setzero_ps(); }
inline Vector Load(const float* p) { return _mm512_load_ps(p); }
inline void Store(float* p, Vector v) { _mm512_store_ps(p, v); }
// Non-temporal store; unordered until the fence.
inline void Stream(float* p, Vector v) { _mm512_stream_ps(p, v); }
inline void Fence() { _mm_sfence(); }
// Loads into a register, which prevents the compiler from loading twice.
inline Vector LoadOnce(const float* p) {
  Vector v = Load(p);
  asm("" : "+v"(v));
  return v;
}
inline Vector Add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector Multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector MultiplyAdd(Vector a, Vector b, Vector c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline Vector LoadFirst(const float* p, int n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}
inline void StoreFirst(float* p, Vector v, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), v);
}

// Broadcasts one float to all lanes, through an integer register, because a
// broadcast from memory would occupy the load port that the products need.
inline Vector Broadcast(const float* p) {
  int bits;
  asm("movl %1, %0" : "=r"(bits) : "m"(*reinterpret_cast<const int*>(p)));
  Vector v;
  asm("vpbroadcastd %1, %0" : "=v"(v) : "r"(bits));
  return v;
}

// The same from memory, for sums that leave the load port idle.
inline Vector BroadcastLoad(const float* p) { return _mm512_set1_ps(*p); }

// Transposes 16 x 16 floats in place.
inline void Transpose(Vector* r) {
  Vector t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  auto low = [](Vector a, Vector b) {
    return _mm512_castpd_ps(
        _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  auto high = [](Vector a, Vector b) {
    return _mm512_castpd_ps(
        _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  for (int i = 0; i < 16; i += 4) {
    r[i] = low(t[i], t[i + 2]);
    r[i + 1] = high(t[i], t[i + 2]);
    r[i + 2] = low(t[i + 1], t[i + 3]);
    r[i + 3] = high(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Sums the lanes of each of 16 vectors; lane i of the result is the sum of
// r[i].
inline Vector SumLanes(const Vector* r) {
  auto pair = [](Vector a, Vector b) {
    return Add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  auto halves = [](Vector a, Vector b) {
    return Add(_mm512_shuffle_f32x4(a, b, 0x88),
               _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  Vector q[4];
  for (int i = 0; i < 4; ++i) {
    q[i] = pair(pair(r[i], r[i + 8]), pair(r[i + 4], r[i + 12]));
  }
  const Vector sums = halves(halves(q[0], q[1]), halves(q[2], q[3]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10,
                                          14, 3, 7, 11, 15);
  return _mm512_permutexvar_ps(order, sums);
}

// Writes the floats whose bit is set, and their indices, counted from `first`;
// returns their number. May write up to 16 entries in any case.
inline int Compress(Vector v, uint32_t bits, int first, float* values,
                    uint16_t* indices) {
  const __mmask16 kept = static_cast<__mmask16>(bits);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                                          12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(kept, v));
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(indices),
      _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(kept, index)));
  return __builtin_popcount(bits & 0xffff);
}

// Returns a bit set, where bit i is set if byte i of n <= 16 is not zero.
inline uint32_t NonZero(const uint8_t* p, int n) {
  const __mmask16 there = static_cast<__mmask16>((1u << n) - 1);
  const __m128i bytes = _mm_maskz_loadu_epi8(there, p);
  return _mm_test_epi8_mask(bytes, bytes);
}

// Returns v with zero in the lanes whose bit is not set, also in place of NaN.
inline Vector Keep(uint32_t bits, Vector v) {
  return _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), v);
}

}  // namespace
}  // namespace simd
