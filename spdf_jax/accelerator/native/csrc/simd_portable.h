// SPDX-License-Identifier: Apache-2.0
// Vectors of 4 floats, with the portable vector extensions of GCC and Clang.
#pragma once
#include <cstdint>
#include <cstring>

// The inner namespace is unnamed, so that each set of kernels has its own
// functions.
namespace simd {
namespace {

typedef float Vector __attribute__((vector_size(16)));
constexpr int kWidth = 4;
constexpr int kForwardVectors = 8;
constexpr int kBackwardVectors = 4;

inline Vector Zero() { return Vector{}; }
inline Vector Load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void Store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }
inline void Stream(float* p, Vector v) { Store(p, v); }
inline void Fence() {}
inline Vector LoadOnce(const float* p) { return Load(p); }
inline Vector Add(Vector a, Vector b) { return a + b; }
inline Vector Multiply(Vector a, Vector b) { return a * b; }
inline Vector MultiplyAdd(Vector a, Vector b, Vector c) { return a * b + c; }
inline Vector Broadcast(const float* p) { return Vector{*p, *p, *p, *p}; }
inline Vector LoadFirst(const float* p, int n) {
  Vector v{};
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}
inline void StoreFirst(float* p, Vector v, int n) {
  std::memcpy(p, &v, n * sizeof(float));
}

inline void Transpose(Vector* r) {
  Vector t[4];
  for (int i = 0; i < 4; ++i) t[i] = r[i];
  for (int i = 0; i < 4; ++i) r[i] = Vector{t[0][i], t[1][i], t[2][i], t[3][i]};
}

inline Vector SumLanes(const Vector* r) {
  Vector t[4] = {r[0], r[1], r[2], r[3]};
  Transpose(t);
  return (t[0] + t[1]) + (t[2] + t[3]);
}

inline int Compress(Vector v, uint32_t bits, int first, float* values,
                    uint16_t* indices) {
  int n = 0;
  for (int i = 0; i < kWidth; ++i) {
    values[n] = v[i];
    indices[n] = static_cast<uint16_t>(first + i);
    n += bits >> i & 1;
  }
  return n;
}

inline uint32_t NonZero(const uint8_t* p, int n) {
  uint32_t bits = 0;
  for (int i = 0; i < n; ++i) bits |= static_cast<uint32_t>(p[i] != 0) << i;
  return bits;
}

inline Vector Keep(uint32_t bits, Vector v) {
  return Vector{bits & 1 ? v[0] : 0, bits & 2 ? v[1] : 0, bits & 4 ? v[2] : 0,
                bits & 8 ? v[3] : 0};
}

}  // namespace
}  // namespace simd
