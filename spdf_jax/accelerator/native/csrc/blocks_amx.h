// SPDX-License-Identifier: Apache-2.0
// Products of blocks by the tiles of AMX.
#pragma once
#include <immintrin.h>

#include "blocks_bfloat16.h"
#ifdef SPDF_EMULATED_TILES  // A header, in tests on other processors.
#include SPDF_EMULATED_TILES
#endif

namespace spdf {
namespace {

// Multiplies packed blocks while it exists: tiles are configured per thread,
// and released so that the thread's state is small.
class BlockProducts {
 public:
  BlockProducts() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = 16;
      config.row_bytes[i] = 64;
    }
    Barrier();
    _tile_loadconfig(&config);
  }
  ~BlockProducts() { _tile_release(); }
  BlockProducts(const BlockProducts&) = delete;
  BlockProducts& operator=(const BlockProducts&) = delete;

  void Add(const Bfloat16* left, const int32_t* indices, const Bfloat16* right,
           int64_t n, bool first, float* sums) const {
    constexpr int64_t kHalf = kBlock / 2;
    constexpr int64_t kRow = kSide * sizeof(float);
    constexpr int64_t kPairs = kSide * sizeof(Bfloat16);
    Barrier();
    if (first) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, sums, kRow);
      _tile_loadd(1, sums + 16, kRow);
      _tile_loadd(2, sums + kHalf, kRow);
      _tile_loadd(3, sums + kHalf + 16, kRow);
    }
    for (int64_t i = 0; i < n; ++i, right += kBlock) {
      const Bfloat16* rows = left + (indices ? indices[i] : i) * kBlock;
      _tile_loadd(4, rows, kPairs);
      _tile_loadd(6, right, kPairs);
      _tile_loadd(5, rows + kHalf, kPairs);
      _tile_loadd(7, right + kHalf, kPairs);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, kRow);
    _tile_stored(1, sums + 16, kRow);
    _tile_stored(2, sums + kHalf, kRow);
    _tile_stored(3, sums + kHalf + 16, kRow);
  }

 private:
  // Completes earlier stores, because GCC's intrinsics for loads do not tell
  // the compiler that they read memory.
  static void Barrier() { asm volatile("" ::: "memory"); }
};

}  // namespace
}  // namespace spdf
