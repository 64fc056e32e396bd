// The product with a listed matrix.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "lists.h"

namespace spdf {
namespace {

template <int kVectors>
void MultiplyTile(const Lists& lists, const float* x, int64_t tokens,
                  float* y) {
  constexpr int kTile = kVectors * kWidth;
  static thread_local Scratch room;
  float* packed = room.Get<float>((lists.terms + kRegionOutputs) * kTile);
  float* sums = packed + lists.terms * kTile;
  Pack(x, lists.terms, tokens, lists.terms, kTile, packed);
  for (int64_t region = 0; region < lists.Regions(); ++region) {
    const int64_t first = region * kRegionOutputs;
    const int64_t outputs = lists.End(region) - first;
    for (int64_t b = 0; b < lists.Blocks(); ++b) {
      (b ? AddBlock<kVectors, false> : AddBlock<kVectors, true>)(
          packed + b * lists.block * kTile, lists.Values(region),
          lists.Indices(region), lists.StartsOf(region) + b * outputs, outputs,
          sums);
    }
    Unpack(sums, kTile, tokens, outputs, lists.outputs, y + first);
  }
}

// Vectors of tokens in a tile: as many as there are tokens for all workers.
int Vectors(int most, int64_t tokens, int64_t workers) {
  while (most > 1 && tokens <= most / 2 * kWidth * workers) most /= 2;
  return most;
}

// Multiplies by a matrix of which list(lists, region) lists a region.
template <typename List>
void MultiplyListed(const Workers& workers, const float* x, int64_t terms,
                    int64_t outputs, bool sparse, int64_t tokens, float* y,
                    const List& list) {
  const int most = simd::kForwardVectors / (sparse ? 2 : 1);
  const int vectors = Vectors(most, tokens, workers.number);
  Lists lists;
  lists.outputs = outputs;
  lists.terms = terms;
  // The rows of a block and their tile stay in the first-level cache.
  lists.block = vectors == simd::kForwardVectors ? 64 : 128;
  lists.Allocate();
  workers.parallel_for(lists.Regions(),
                       [&](int64_t region) { list(lists, region); });
  const int64_t tile = vectors * kWidth;
  workers.parallel_for(Ceil(tokens, tile), [&](int64_t i) {
    const int64_t first = i * tile;
    const int64_t here = std::min(tile, tokens - first);
    (vectors == 8   ? MultiplyTile<8>
     : vectors == 4 ? MultiplyTile<4>
     : vectors == 2 ? MultiplyTile<2>
                    : MultiplyTile<1>)(lists, x + first * lists.terms, here,
                                       y + first * lists.outputs);
  });
}

}  // namespace
}  // namespace spdf
