// The keys that rank units: the larger is kept first.
#pragma once
#include <cstdint>
#include <cstring>

namespace spdf {
namespace {

// Of the score's bits those in `read` count: without the sign's its magnitude.
inline uint32_t SortableBits(float score, uint32_t read) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  bits &= read;
  const uint32_t magnitude = bits & 0x7fffffff;
  // One zero, and what XLA's threads take for it: subnormal numbers.
  if (magnitude < 0x00800000) bits = 0;
  const uint32_t sortable = bits >> 31 ? ~bits : bits | 0x80000000;
  return magnitude > 0x7f800000 ? 0 : sortable;  // NaN: below everything.
}

// Both words of Threefry-2x32 of 20 rounds, combined by exclusive or.
inline uint32_t RandomBits(const uint32_t (&words)[3], uint32_t high,
                           uint32_t low) {
  uint32_t x = high + words[0], y = low + words[1];
  const auto round = [&](int shift) {
    x += y;
    y = x ^ (y << shift | y >> (32 - shift));
  };
  for (uint32_t i = 0; i < 5; ++i) {
    const bool odd = i % 2;
    round(odd ? 17 : 13);
    round(odd ? 29 : 15);
    round(odd ? 16 : 26);
    round(odd ? 24 : 6);
    x += words[(i + 1) % 3];
    y += words[(i + 2) % 3] + i + 1;
  }
  return x ^ y;
}

}  // namespace
}  // namespace spdf
