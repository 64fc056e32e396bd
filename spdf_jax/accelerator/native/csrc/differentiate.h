// SPDX-License-Identifier: Apache-2.0
// Gradients of the product with a listed matrix.
#pragma once
#include <algorithm>
#include <cstdint>

#include "gradients.h"
#include "multiply.h"

namespace spdf {
namespace {

template <int kVectors, bool kWithDx>
void DifferentiateTile(const Lists& lists, const Element* x, const Element* dy,
                       int64_t tokens, bool first_tile, bool past_caches,
                       Element* dx, float* sums) {
  constexpr int kTile = kVectors * kTokens;
  static thread_local Scratch packed_room, dx_room;
  Element* packed_dy =
      packed_room.Get<Element>((lists.Rows() + kRegionOutputs) * kTile);
  Element* packed_x = packed_dy + lists.Rows() * kTile;
  float* packed_dx = dx_room.Get<float>(kRegionOutputs * kTile);
  PackTerms(lists, dy, tokens, kTile, packed_dy);
  for (int64_t region = 0; region < lists.Regions(); ++region) {
    const int64_t first = region * kRegionOutputs;
    const int64_t outputs = lists.End(region) - first;
    Pack(x + first, lists.outputs, tokens, outputs, kTile, packed_x);
    for (int64_t b = 0; b < lists.Blocks(); ++b) {
      (b ? DifferentiateBlock<kVectors, false, kWithDx>
         : DifferentiateBlock<kVectors, true, kWithDx>)(
          packed_dy + b * lists.RowsOfBlock() * kTile, packed_x,
          lists.Values(region, b),
          lists.Indices(region, b), lists.Starts(region, b), outputs,
          first_tile, packed_dx, sums + lists.First(region, b));
    }
    if (kWithDx) {
      Unpack(packed_dx, kTile, tokens, outputs, lists.outputs, past_caches,
             dx + first);
    }
  }
  simd::Fence();
}

// Computes the gradients of x @ matrix; write(lists, region, sums, copies,
// copy) writes the gradient of a region of rows from `copies` arrays of partial
// sums of size `copy`.
template <bool kWithDx, typename M, typename Write>
void DifferentiateListed(const Workers& workers, const Element* x,
                         const Element* dy, const M& matrix, int64_t tokens,
                         Element* dx, const Write& write) {
  const int64_t inputs = matrix.rows, outputs = matrix.columns;
  const int vectors = Vectors(kBackwardVectors, tokens, workers.number);
  Lists lists;
  lists.outputs = inputs;
  lists.terms = outputs;
  lists.block = matrix.IsSparse() ? kMostTerms : 96;
  List(workers, matrix, false, &lists);
  const bool past_caches = OutgrowCaches(tokens * inputs);
  const int64_t tile = vectors * kTokens;
  const int64_t tiles = Ceil(tokens, tile);
  const int64_t parts = std::min(tiles, workers.number);
  const int64_t copy = lists.Entries();
  static thread_local Scratch room;
  float* sums = room.Get<float>(parts * copy);
  // Each part sums a fixed range of tokens, so the order of summation is fixed.
  workers.parallel_for(parts, [&](int64_t part) {
    const int64_t first_tile = part * tiles / parts;
    for (int64_t i = first_tile; i < (part + 1) * tiles / parts; ++i) {
      const int64_t first = i * tile;
      const int64_t here = std::min(tile, tokens - first);
      WithVectors<kBackwardVectors>(vectors, [&](auto number) {
        DifferentiateTile<number(), kWithDx>(
            lists, x + first * inputs, dy + first * outputs, here,
            i == first_tile, past_caches,
            kWithDx ? dx + first * inputs : nullptr, sums + part * copy);
      });
    }
  });
  workers.parallel_for(lists.Regions(), [&](int64_t region) {
    write(lists, region, sums, parts, copy);
  });
}

}  // namespace
}  // namespace spdf
