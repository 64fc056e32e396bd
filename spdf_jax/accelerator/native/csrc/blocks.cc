// SPDX-License-Identifier: Apache-2.0
// The products with block masks, compiled once per way to multiply blocks;
// SPDF_KERNELS is the name of the resulting variable. Other masks are left to
// the kernels SPDF_OTHERS.
//
// A product of blocks has both factors packed, 32 tokens or weights at a time,
// and sums in floats. Every sum has one order, whatever the number of workers.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "block_lists.h"
#include "scratch.h"
#include SPDF_PRODUCTS

namespace spdf {
namespace {

constexpr int64_t kTileBytes = 1 << 20;      // Of packed tokens, in L2.
constexpr int64_t kMostTileTokens = 512;
constexpr int64_t kLeastTileTokens = 64;
constexpr int64_t kSegmentTokens = 1024;     // Packed at once for dw.
constexpr int64_t kMostSegments = 12;        // Loops of a team are limited.
constexpr int64_t kRowsAtOnce = 12;          // Rows of blocks of dw, in L2.
constexpr int64_t kPartsPerWorker = 4;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kLine = kLineBytes / sizeof(Element);

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns whether results are written past the caches: whole lines, and more
// than the next operation would find in L2.
bool PassCaches(const Element* y, int64_t results) {
  constexpr int64_t kBytes = 2 << 20;
  return reinterpret_cast<uintptr_t>(y) % kLineBytes == 0 &&
         results * static_cast<int64_t>(sizeof(Element)) >= kBytes;
}

// Writes rows of sums [32, 32].
void Write(const float* sums, int64_t rows, int64_t stride, bool past_caches,
           Element* to) {
  for (int64_t i = 0; i < std::min(rows, kSide); ++i, to += stride) {
    WriteRow(sums + i * kSide, past_caches, to);
  }
}

// Packs the weights of a sum, the right factors of its products.
void PackWeights(const BlockMask& mask, const Terms& terms, bool transpose,
                 const Element* weights, int64_t sum, Element* packed) {
  for (int32_t i = terms.starts[sum]; i < terms.starts[sum + 1]; ++i) {
    const int64_t term = terms.terms[i];
    const Place place =
        transpose ? mask.Find(sum, term) : mask.Find(term, sum);
    Rows rows(weights + place.first, place.stride, kSide);
    transpose ? rows.Transpose() : rows.Interleave();
    rows.Store(packed + i * kBlock);
  }
}

int64_t TileTokens(int64_t tokens, int64_t terms, int64_t workers) {
  const int64_t fit = kTileBytes / (terms * kSide * sizeof(Element));
  const int64_t most = std::clamp(fit / kSide * kSide, kLeastTileTokens,
                                  kMostTileTokens);
  return std::min(most, Ceil(Ceil(tokens, workers), kSide) * kSide);
}

// Where tokens are packed as a factor of dw, [features, groups of 32 tokens].
struct Factor {
  Element* blocks;  // Null: nowhere.
  int64_t groups;
  bool transpose;
};

// Packs tokens [tokens, all], both as left factors [groups, all] of products
// with weights, unless `tile` is null, and as a factor of dw from a group on.
void PackTokens(const Element* x, int64_t tokens, int64_t all, Element* tile,
                const Factor& factor, int64_t group) {
  for (int64_t g = 0; g * kSide < tokens; ++g, ++group) {
    for (int64_t c = 0; c < all; ++c) {
      Rows rows(x + (g * all * kSide + c) * kSide, all * kSide,
                tokens - g * kSide);
      if (tile) rows.Store(tile + (g * all + c) * kBlock);
      if (!factor.blocks) continue;
      rows.Interleave();
      if (factor.transpose) rows.Transpose();
      rows.Store(factor.blocks + (c * factor.groups + group) * kBlock);
    }
  }
}

Element* TileRoom(int64_t tokens, int64_t all) {
  static thread_local Scratch room;
  return room.Get<Element>(Ceil(tokens, kSide) * all * kBlock);
}

// Multiplies a packed tile of tokens by packed weights.
void MultiplyTile(const Terms& terms, const Element* packed, int64_t all,
                  const Element* tile, int64_t tokens, bool past_caches,
                  Element* y) {
  const BlockProducts products;
  const int64_t sums = static_cast<int64_t>(terms.starts.size()) - 1;
  // Lines of the next weights, in equal parts per group of tokens.
  const int64_t ahead = Ceil(terms.starts.back() * kBlock / kLine,
                             sums * Ceil(tokens, kSide));
  alignas(64) float sum[kBlock];
  for (int64_t s = 0; s < sums; ++s) {
    const int32_t first = terms.starts[s];
    const Element* next = packed + terms.starts[s + 1] * kBlock;
    for (int64_t g = 0; g * kSide < tokens; ++g) {
      for (int64_t i = 0; i < ahead; ++i, next += kLine) {
        __builtin_prefetch(next, 0, 2);
      }
      products.Add(tile + g * all * kBlock, terms.terms.data() + first,
                   packed + first * kBlock, terms.starts[s + 1] - first, true,
                   sum);
      Write(sum, tokens - g * kSide, sums * kSide, past_caches,
            y + (g * sums * kSide + s) * kSide);
    }
  }
  simd::Fence();
}

// Computes x @ matrix, or x @ matrix^T.
void Multiply(const Workers& workers, const Element* x, const BlockMask& mask,
              const Element* weights, bool transpose, int64_t tokens,
              Element* y) {
  const int64_t all = transpose ? mask.columns : mask.rows;
  const int64_t sums = transpose ? mask.rows : mask.columns;
  const Terms terms(mask, transpose);
  static thread_local Scratch room;
  Element* packed = room.Get<Element>(mask.Kept() * kBlock);
  workers.parallel_for(sums, [&](int64_t s) {
    PackWeights(mask, terms, transpose, weights, s, packed);
  });
  const bool past_caches = PassCaches(y, tokens * sums * kSide);
  const int64_t tile = TileTokens(tokens, all, workers.number);
  workers.parallel_for(Ceil(tokens, tile), [&](int64_t i) {
    const int64_t first = i * tile;
    const int64_t here = std::min(tile, tokens - first);
    Element* room = TileRoom(here, all);
    PackTokens(x + first * all * kSide, here, all, room, {}, 0);
    MultiplyTile(terms, packed, all, room, here, past_caches,
                 y + first * sums * kSide);
  });
}

// Computes dx for the blocks of `mask`, unless dx is null, and dw for those of
// `of_dw`, zero elsewhere.
void Differentiate(const Workers& workers, const Element* x, const Element* dy,
                   const BlockMask* mask, const Element* weights,
                   const BlockMask& of_dw, int64_t tokens, Element* dx,
                   Element* dw) {
  const int64_t inputs = of_dw.rows, outputs = of_dw.columns;
  const Terms terms = dx ? Terms(*mask, true) : Terms();
  static thread_local Scratch weights_room, left_room, right_room, sums_room;
  Element* packed = weights_room.Get<Element>(terms.terms.size() * kBlock);
  const bool past_dw = PassCaches(dw, of_dw.Stored() * kBlock);
  workers.parallel_for(inputs, [&](int64_t r) {
    if (dx) PackWeights(*mask, terms, true, weights, r, packed);
    if (of_dw.packed) return;
    alignas(64) const float zeros[kBlock] = {};
    for (int64_t c = 0; c < outputs; ++c) {
      const Place place = of_dw.Find(r, c);
      if (of_dw.Number(r, c) >= 0) continue;
      Write(zeros, kSide, place.stride, past_dw, dw + place.first);
    }
    simd::Fence();
  });
  // The kept blocks, in an order that reads packed rows from L2.
  std::vector<std::pair<int32_t, int32_t>> kept;
  for (int64_t first = 0; first < inputs; first += kRowsAtOnce) {
    for (int64_t c = 0; c < outputs; ++c) {
      for (int64_t r = first; r < std::min(inputs, first + kRowsAtOnce); ++r) {
        if (of_dw.Number(r, c) >= 0) kept.emplace_back(r, c);
      }
    }
  }
  const int64_t number = static_cast<int64_t>(kept.size());
  const int64_t segments =
      std::min(Ceil(tokens, kSegmentTokens), kMostSegments);
  const int64_t segment = Ceil(Ceil(tokens, segments), kSide) * kSide;
  const int64_t groups = segment / kSide;
  Element* left = left_room.Get<Element>(inputs * groups * kBlock);
  Element* right = right_room.Get<Element>(outputs * groups * kBlock);
  float* sums = sums_room.Get<float>(segments > 1 ? number * kBlock : 0);
  const bool past_dx = PassCaches(dx, tokens * inputs * kSide);
  for (int64_t begin = 0; begin < tokens; begin += segment) {
    const int64_t end = std::min(tokens, begin + segment);
    const int64_t tile = TileTokens(end - begin, outputs, workers.number);
    workers.parallel_for(Ceil(end - begin, tile), [&](int64_t i) {
      const int64_t first = begin + i * tile;
      const int64_t here = std::min(tile, end - first);
      const int64_t group = i * tile / kSide;
      PackTokens(x + first * inputs * kSide, here, inputs, nullptr,
                 {left, groups, true}, group);
      Element* room = dx ? TileRoom(here, outputs) : nullptr;
      PackTokens(dy + first * outputs * kSide, here, outputs, room,
                 {right, groups, false}, group);
      if (!dx) return;
      MultiplyTile(terms, packed, outputs, room, here, past_dx,
                   dx + first * inputs * kSide);
    });
    const int64_t parts =
        std::min(number, workers.number * kPartsPerWorker);
    workers.parallel_for(parts, [&](int64_t part) {
      const BlockProducts products;
      alignas(64) float sum[kBlock];
      for (int64_t i = part * number / parts; i < (part + 1) * number / parts;
           ++i) {
        const auto [r, c] = kept[i];
        float* to = segments > 1 ? sums + i * kBlock : sum;
        products.Add(left + r * groups * kBlock, nullptr,
                     right + c * groups * kBlock, Ceil(end - begin, kSide),
                     begin == 0, to);
        if (end < tokens) continue;
        const Place place = of_dw.Find(r, c);
        Write(to, kSide, place.stride, past_dw, dw + place.first);
      }
      simd::Fence();
    });
  }
}

void MultiplyMasked(const Workers& workers, const Element* x,
                    const Matrix<Element>& w, bool transpose, int64_t tokens,
                    Element* y) {
  BlockMask mask;
  if (!tokens || !FindBlocks(workers, w.inputs, w.outputs, w.mask, &mask)) {
    SPDF_OTHERS.multiply(workers, x, w, transpose, tokens, y);
    return;
  }
  Multiply(workers, x, mask, w.weights, transpose, tokens, y);
}

void DifferentiateMasked(const Workers& workers, const Element* x,
                         const Element* dy, const Matrix<Element>& w,
                         const uint8_t* grad_mask, int64_t tokens, Element* dx,
                         Element* dw) {
  BlockMask mask, other;
  const auto find = [&](const uint8_t* bytes, BlockMask* found) {
    return FindBlocks(workers, w.inputs, w.outputs, bytes, found);
  };
  const bool same = !dx || w.mask == grad_mask;
  if (!tokens || !find(grad_mask, &mask) || !(same || find(w.mask, &other))) {
    SPDF_OTHERS.differentiate(workers, x, dy, w, grad_mask, tokens, dx, dw);
    return;
  }
  Differentiate(workers, x, dy, same ? &mask : &other, w.weights, mask, tokens,
                dx, dw);
}

// Returns whether a packed mask consists of whole blocks, and lists them.
bool FindBlocks(const Workers& workers, const Packed<Element>& w,
                BlockMask* mask) {
  if (!FindPackedBlocks(workers, w.inputs, w.outputs, w.bits, mask)) {
    return false;
  }
  if (mask->Kept() * kBlock > w.size) {
    throw std::length_error(
        "a packed mask keeps more weights than there are values");
  }
  return true;
}

void MultiplyPacked(const Workers& workers, const Element* x,
                    const Packed<Element>& w, bool transpose, int64_t tokens,
                    Element* y) {
  BlockMask mask;
  if (!tokens || !FindBlocks(workers, w, &mask)) {
    SPDF_OTHERS.multiply_packed(workers, x, w, transpose, tokens, y);
    return;
  }
  Multiply(workers, x, mask, w.values, transpose, tokens, y);
}

void DifferentiatePacked(const Workers& workers, const Element* x,
                         const Element* dy, const Packed<Element>& w,
                         int64_t tokens, Element* dx, Element* dvalues) {
  BlockMask mask;
  if (!tokens || !FindBlocks(workers, w, &mask)) {
    SPDF_OTHERS.differentiate_packed(workers, x, dy, w, tokens, dx, dvalues);
    return;
  }
  std::fill(dvalues + mask.Kept() * kBlock, dvalues + w.size, Element());
  Differentiate(workers, x, dy, &mask, w.values, mask, tokens, dx, dvalues);
}

}  // namespace

extern const Kernels<Element> SPDF_KERNELS;
const Kernels<Element> SPDF_KERNELS = {
    SPDF_NAME, MultiplyMasked, DifferentiateMasked, MultiplyPacked,
    DifferentiatePacked,
    [](auto... args) { SPDF_OTHERS.multiply_listed(args...); },
    [](auto... args) { SPDF_OTHERS.multiply_listed_bfloat16(args...); }};

}  // namespace spdf
