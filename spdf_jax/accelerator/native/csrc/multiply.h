// SPDX-License-Identifier: Apache-2.0
// The product with a listed matrix.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels.h"
#include "lists.h"

namespace spdf {
namespace {

// Packs a tile of tokens [tokens, terms] into rows that the indices of entries
// address.
void PackTerms(const Lists& lists, const Element* x, int64_t tokens, int tile,
               Element* packed) {
  // Without padding rows, all blocks are contiguous and packed at once.
  const int64_t step = kAtOnce > 1 ? lists.block : lists.terms;
  for (int64_t first = 0; first < lists.terms; first += step) {
    const int64_t here = std::min(step, lists.terms - first);
    Pack(x + first, lists.terms, tokens, here, tile, packed);
    packed += lists.RowsOfBlock() * tile;
    if (kAtOnce > 1) std::fill(packed - tile, packed, Element());
  }
}

// Returns whether this number of results exceeds the caches, which makes
// non-temporal stores faster.
bool OutgrowCaches(int64_t results) {
  constexpr int64_t kBytes = 16 << 20;
  return results * static_cast<int64_t>(sizeof(Element)) >= kBytes;
}

template <int kVectors>
void MultiplyTile(const Lists& lists, const Element* x, int64_t tokens,
                  bool past_caches, Element* y) {
  constexpr int kTile = kVectors * kTokens;
  static thread_local Scratch packed_room, sums_room;
  Element* packed = packed_room.Get<Element>(lists.Rows() * kTile);
  float* sums = sums_room.Get<float>(kRegionOutputs * kTile);
  PackTerms(lists, x, tokens, kTile, packed);
  for (int64_t region = 0; region < lists.Regions(); ++region) {
    const int64_t first = region * kRegionOutputs;
    const int64_t outputs = lists.End(region) - first;
    for (int64_t b = 0; b < lists.Blocks(); ++b) {
      (b ? AddBlock<kVectors, false> : AddBlock<kVectors, true>)(
          packed + b * lists.RowsOfBlock() * kTile, lists.Values(region, b),
          lists.Indices(region, b), lists.Starts(region, b), outputs, sums);
    }
    Unpack(sums, kTile, tokens, outputs, lists.outputs, past_caches, y + first);
  }
  simd::Fence();
}

// Returns the number of vectors of tokens in a tile: at most `most`, and fewer
// if there are too few tokens to give every worker a tile.
int Vectors(int most, int64_t tokens, int64_t workers) {
  while (most > 1 && tokens <= most / 2 * kTokens * workers) most /= 2;
  return most;
}

// Calls f with a number of vectors, at most kMost, as a compile-time constant.
template <int kMost, typename F>
void WithVectors(int vectors, const F& f) {
  if constexpr (kMost > 1) {
    if (vectors < kMost) return WithVectors<kMost / 2>(vectors, f);
  }
  f(std::integral_constant<int, kMost>());
}

// Computes x[tokens, rows] @ matrix, or x[tokens, columns] @ matrix^T.
template <typename M>
void MultiplyListed(const Workers& workers, const Element* x, const M& matrix,
                    bool transpose, int64_t tokens, Element* y) {
  // ListColumns stores positions in a block as 16 bits.
  static_assert(2 * kForwardBlock * kRegionOutputs <= 1 << 16);
  const int most = kForwardVectors / (matrix.IsSparse() ? 2 : 1);
  const int vectors = Vectors(most, tokens, workers.number);
  Lists lists;
  lists.outputs = transpose ? matrix.rows : matrix.columns;
  lists.terms = transpose ? matrix.columns : matrix.rows;
  lists.block = kForwardBlock * (vectors == kForwardVectors ? 1 : 2);
  List(workers, matrix, !transpose, &lists);
  const int64_t tile = vectors * kTokens;
  const bool past_caches = OutgrowCaches(tokens * lists.outputs);
  workers.parallel_for(Ceil(tokens, tile), [&](int64_t i) {
    const int64_t first = i * tile;
    const int64_t here = std::min(tile, tokens - first);
    WithVectors<kForwardVectors>(vectors, [&](auto number) {
      MultiplyTile<number()>(lists, x + first * lists.terms, here, past_caches,
                             y + first * lists.outputs);
    });
  });
}

}  // namespace
}  // namespace spdf
