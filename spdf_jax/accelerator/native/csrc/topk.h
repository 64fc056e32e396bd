// Which units of a competition are kept: those of the largest keys, exactly.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels.h"
#include "parts.h"

namespace spdf {
namespace {

// The key of the last unit that is kept is looked for where a sample of the
// units has it; if it is not there, or too many are, it is found digit by digit
// from the highest, by counting how many units have each. Keys are made anew in
// every pass.
class Selection {
 public:
  Selection(const Workers& workers, const Competition& competition)
      : workers_(workers), need_(competition.kept) {
    for (const Span& span : competition.spans) units_ += span.size;
    for (const Span& span : competition.spans) {
      // Some for each worker, of all spans together.
      const double share = span.size / std::max(1.0, 1.0 * units_);
      const int64_t number = std::max(
          std::min(static_cast<int64_t>(std::ceil(workers.number * share)),
                   span.size / kSmallest),
          1 + span.size / kLargest);
      const int64_t size = (span.size + number - 1) / number;
      for (int64_t start = 0; start < span.size; start += size) {
        parts_.emplace_back(span, start, std::min(span.size, start + size),
                            Room::Of(parts_.size()));
      }
    }
    const Span& first = competition.spans.front();
    has_scores_ = first.floats != nullptr || first.integers != nullptr;
    has_random_bits_ = first.words != nullptr;
  }

  void Run() {
    Part::Rule rule = {!has_scores_, false, 0};
    bool is_listed = FindLast(rule);
    if (is_tied_ && has_scores_ && has_random_bits_) {
      rule = {true, true, last_};
      is_listed = FindLast(rule);
    }
    if (is_listed) {
      for (Part& part : parts_) need_ = part.KeepListed(last_, need_);
      return;
    }
    ForParts([&](Part& part) { part.Keep(rule, last_, !is_tied_); });
    if (!is_tied_) return;
    for (Part& part : parts_) {
      if (need_ == 0) return;
      need_ = part.KeepFirst(rule, last_, need_);
    }
  }

 private:
  static constexpr int64_t kSmallest = 1 << 15, kLargest = 1 << 30;
  static constexpr int kDeviations = 3;  // Of a rank in the sample.

  template <typename F>
  void ForParts(F f) {
    workers_.parallel_for(static_cast<int64_t>(parts_.size()),
                          [&](int64_t i) { f(parts_[i]); });
  }

  // Finds the least key that is kept, how many of the units that have it are
  // needed, and whether more have it. Returns whether all that may be kept
  // beside those above it is listed.
  bool FindLast(Part::Rule rule) {
    const bool is_listed = FindAsSampled(rule);
    if (!is_listed) FindByDigits(rule);
    return is_listed;
  }

  bool FindAsSampled(Part::Rule rule) {
    // The larger it is, the fewer are listed.
    const int64_t stride = 1 + static_cast<int64_t>(std::cbrt(units_)) / 2;
    std::vector<uint32_t> keys;
    for (Part& part : parts_) {
      part.Sample(rule, stride);
      keys.insert(keys.end(), part.begin(), part.end());
    }
    const int64_t rank = need_ / stride;
    const auto margin = static_cast<int64_t>(kDeviations * std::sqrt(rank + 1));
    const int64_t last = rank + margin, first = rank - margin;
    const auto found = static_cast<int64_t>(keys.size());
    if (first >= found) return false;
    const uint32_t most = first < 0 ? ~0u : Largest(keys, first, 0, ~0u);
    const uint32_t least = last < found ? Largest(keys, last, 0, ~0u) : 0;

    ForParts([&](Part& part) { part.List(rule, least, most); });
    keys.clear();
    int64_t need = need_;
    for (const Part& part : parts_) {
      if (!part.has_listed()) return false;
      keys.insert(keys.end(), part.begin(), part.end());
      need -= part.above();
    }
    if (need <= 0 || need > static_cast<int64_t>(keys.size())) return false;
    last_ = Largest(keys, need - 1, least, most);
    for (uint32_t key : keys) need -= key > last_;
    is_tied_ = need < std::count(keys.begin(), keys.end(), last_);
    need_ = need;
    return true;
  }

  // Returns the key of a rank among keys from `least` to `most`; reorders them.
  static uint32_t Largest(std::vector<uint32_t>& keys, int64_t rank,
                          uint32_t least, uint32_t most) {
    int shift = 0;
    while ((most - least) >> shift >= kBins) ++shift;
    uint32_t bins[kBins] = {};
    for (uint32_t key : keys) ++bins[(key - least) >> shift];
    int64_t bin = kBins;
    do {
      rank -= bins[--bin];
    } while (rank >= 0);
    rank += bins[bin];
    // Those of its bin, moved to the front.
    size_t n = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const uint32_t key = keys[i];
      keys[i] = keys[n];
      keys[n] = key;
      n += (key - least) >> shift == bin;
    }
    std::nth_element(keys.begin(), keys.begin() + rank, keys.begin() + n,
                     std::greater<>());
    return keys[rank];
  }

  void FindByDigits(Part::Rule rule) {
    Part::Prefix prefix = {0, 0};
    is_tied_ = true;
    while (prefix.known < 32 && is_tied_) {
      // The last digit begins with bits that are known.
      const int shift = std::max(0, 32 - prefix.known - kDigit);
      ForParts([&](Part& part) { part.CountDigits(rule, prefix, shift); });
      uint32_t digit = kBins;
      int64_t left = 0;
      do {
        need_ -= left;
        left = 0;
        --digit;
        for (const Part& part : parts_) left += part.Count(digit);
      } while (digit > 0 && left < need_);
      need_ = std::min(need_, left);
      is_tied_ = need_ < left;
      prefix = {prefix.bits | digit << shift, 32 - shift};
    }
    last_ = prefix.bits;
  }

  const Workers& workers_;
  std::vector<Part> parts_;
  bool has_scores_, has_random_bits_;
  int64_t units_ = 0;
  int64_t need_;  // How many of those that have the last key.
  uint32_t last_ = 0;
  bool is_tied_ = false;
};

void Select(const Workers& workers, const Competition& competition) {
  if (competition.kept > 0) {
    Selection(workers, competition).Run();
    return;
  }
  for (const Span& span : competition.spans) {
    std::memset(span.mask, 0, span.size);
  }
}

}  // namespace
}  // namespace spdf
