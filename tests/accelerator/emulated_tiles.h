// SPDX-License-Identifier: Apache-2.0
// The tile instructions of AMX in portable C++, for tests on other processors:
// Intel's Software Developer's Manual, volume 2, TDPBF16PS and its neighbors.
// What raises an exception on a processor aborts.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace spdf {
namespace emulated {
namespace {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;

struct Tile {
  int rows = 0, row_bytes = 0;
  alignas(64) uint8_t data[kMostRows][kMostBytes] = {};

  float Float(int row, int i) const {
    float value;
    std::memcpy(&value, data[row] + 4 * i, sizeof value);
    return value;
  }
};

thread_local Tile tiles[kTiles];

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "emulated tiles: %s\n", what);
  std::abort();
}

Tile& Get(int tile) {
  Require(tile >= 0 && tile < kTiles && tiles[tile].rows > 0 &&
              tiles[tile].row_bytes > 0,
          "the tile is not configured in this thread");
  return tiles[tile];
}

void Release() {
  for (Tile& tile : tiles) tile = Tile();
}

void LoadConfig(const void* from) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  Require(bytes[0] == 1, "the palette is not 1");
  Release();
  for (int i = 1; i < 16; ++i) Require(i == 1 || !bytes[i], "reserved bytes");
  for (int i = 0; i < kTiles; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    const uint8_t rows = bytes[48 + i];
    Require(rows <= kMostRows && row_bytes <= kMostBytes, "tile too large");
    tiles[i].rows = rows;
    tiles[i].row_bytes = row_bytes;
  }
}

void Zero(int tile) {
  std::memset(Get(tile).data, 0, sizeof Get(tile).data);
}

void Load(int tile, const void* from, int64_t stride) {
  Tile& to = Get(tile);
  Zero(tile);
  for (int row = 0; row < to.rows; ++row) {
    std::memcpy(to.data[row], static_cast<const char*>(from) + row * stride,
                to.row_bytes);
  }
}

void Store(int tile, void* to, int64_t stride) {
  const Tile& from = Get(tile);
  for (int row = 0; row < from.rows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, from.data[row],
                from.row_bytes);
  }
}

// Denormal operands and results are zero.
float Flush(float value) {
  return std::fabs(value) < FLT_MIN ? std::copysign(0.f, value) : value;
}

float Wide(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return Flush(value);
}

// Adds a product of pairs: first terms and second terms have a sum each.
void AddProducts(int to, int left, int right) {
  Tile& sums = Get(to);
  const Tile &a = Get(left), &b = Get(right);
  Require(to != left && to != right && left != right, "tiles coincide");
  Require(sums.rows == a.rows && sums.row_bytes == b.row_bytes &&
              a.row_bytes == 4 * b.rows && sums.row_bytes % 4 == 0,
          "shapes of tiles do not fit");
  const int columns = sums.row_bytes / 4;
  for (int m = 0; m < sums.rows; ++m) {
    float parts[kMostBytes / 4][2] = {};
    for (int k = 0; k < b.rows; ++k) {
      for (int n = 0; n < columns; ++n) {
        for (int i = 0; i < 2; ++i) {
          parts[n][i] = Flush(std::fma(Wide(a.data[m] + 4 * k + 2 * i),
                                       Wide(b.data[k] + 4 * n + 2 * i),
                                       parts[n][i]));
        }
      }
    }
    for (int n = 0; n < columns; ++n) {
      const float sum = Flush(Flush(sums.Float(m, n)) +
                              Flush(parts[n][0] + parts[n][1]));
      std::memcpy(sums.data[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

}  // namespace
}  // namespace emulated
}  // namespace spdf

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig spdf::emulated::LoadConfig
#define _tile_release spdf::emulated::Release
#define _tile_zero spdf::emulated::Zero
#define _tile_loadd spdf::emulated::Load
#define _tile_stored spdf::emulated::Store
#define _tile_dpbf16ps spdf::emulated::AddProducts
