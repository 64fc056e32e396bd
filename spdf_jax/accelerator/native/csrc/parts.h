// Units of a competition, read by one thread.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "keys.h"
#include "scratch.h"
#include SPDF_SIMD

namespace spdf {
namespace {

constexpr int kDigit = 11;
constexpr int64_t kBins = 1 << kDigit;
constexpr int64_t kBlock = 2048;  // Units.
constexpr int kCopies = 4;  // Of bins, which collide less.

// Memory for a part of the units, kept from call to call.
struct Room {
  alignas(64) uint32_t keys[kBlock];  // Zero where no candidate is.
  uint8_t candidates[kBlock];
  uint8_t kept[kBlock];  // Whatever the keys are.
  uint32_t scores[kBlock];
  uint32_t copies[kCopies * kBins];
  Scratch listed;

  static Room& Of(size_t part) {
    static thread_local std::vector<std::unique_ptr<Room>> rooms;
    while (rooms.size() <= part) rooms.push_back(std::make_unique<Room>());
    return *rooms[part];
  }
};

// Units of a span, gone through by one thread, a block at a time.
class Part {
 public:
  Part(const Span& span, int64_t start, int64_t end, Room& room)
      : span_(span),
        start_(start),
        end_(end),
        most_listed_(std::max(kLeastListed, (end - start) / 4)),
        room_(room),
        // What a block adds, and a vector of which one entry counts.
        listed_(room.listed.Get<uint32_t>(
            2 * (most_listed_ + kBlock + simd::kWidth))),
        places_(listed_ + most_listed_ + kBlock + simd::kWidth) {}

  // What the competition is about: the scores, or random bits among those of a
  // score.
  struct Rule {
    bool by_random_bits;
    bool among_equals;
    uint32_t score;
  };

  // What is known of the key of the last unit that is kept: its first bits.
  struct Prefix {
    uint32_t bits;
    int known;

    bool IsOf(uint32_t key) const {
      return ((uint64_t{key} ^ bits) >> (32 - known)) == 0;
    }
  };

  // Counts the digits, from the bit `shift` on, of keys with a prefix.
  void CountDigits(Rule rule, Prefix prefix, int shift) {
    uint32_t* copies = room_.copies;
    std::fill_n(copies, kCopies * kBins, 0);
    int64_t candidates = 0;
    ForBlocks(rule, [&](int64_t, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t key = room_.keys[i];
        copies[i % kCopies * kBins + (key >> shift) % kBins] +=
            prefix.IsOf(key);
      }
      for (int64_t i = 0; i < count; ++i) candidates += room_.candidates[i];
      return true;
    });
    others_ = prefix.IsOf(0) ? end_ - start_ - candidates : 0;
  }
  int64_t Count(uint32_t digit) const {
    int64_t count = digit == 0 ? -others_ : 0;
    for (int i = 0; i < kCopies; ++i) count += room_.copies[i * kBins + digit];
    return count;
  }

  // Lists the keys of candidates in every `stride`-th run of units.
  void Sample(Rule rule, int64_t stride) {
    number_ = 0;
    for (int64_t start = start_; start < end_; start += kRun * stride) {
      const int64_t count = std::min(kRun, end_ - start);
      Read(rule, start, count);
      for (int64_t i = 0; i < count; ++i) {
        listed_[number_] = room_.keys[i];
        number_ += room_.candidates[i];
      }
    }
  }

  // Keeps what is above `most`, and lists what is from `least` on to it, unless
  // that is too much.
  void List(Rule rule, uint32_t least, uint32_t most) {
    int64_t n = 0;
    above_ = 0;
    ForBlocks(rule, [&](int64_t start, int64_t count) {
      Room& b = room_;
      uint8_t* mask = span_.mask + start;
      uint32_t above = 0;
      for (int64_t i = 0; i < count; ++i) above += b.keys[i] > most;
      for (int64_t i = 0; i < count; ++i) {
        mask[i] = b.kept[i] | (b.keys[i] > most);
      }
      for (int64_t i = 0; i < count; ++i) {
        b.candidates[i] &= b.keys[i] - least <= most - least;
      }
      above_ += above;
      std::memset(b.candidates + count, 0, kBlock - count);
      for (int64_t i = 0; i < count; i += simd::kWidth) {
        const uint32_t bits = simd::NonZero(b.candidates + i, simd::kWidth);
        if (bits == 0) continue;
        // Keys are moved as if they were floats.
        const auto keys = reinterpret_cast<const float*>(b.keys + i);
        uint16_t places[simd::kWidth];
        const int number = simd::Compress(
            simd::Load(keys), bits, static_cast<int>(i),
            reinterpret_cast<float*>(listed_ + n), places);
        for (int j = 0; j < simd::kWidth; ++j) {
          places_[n + j] = static_cast<uint32_t>(start - start_) + places[j];
        }
        n += number;
      }
      return n <= most_listed_;
    });
    number_ = n;
  }
  const uint32_t* begin() const { return listed_; }
  const uint32_t* end() const { return listed_ + number_; }
  bool has_listed() const { return number_ <= most_listed_; }
  int64_t above() const { return above_; }

  // Keeps of what is listed what is above a key, and the first `need` that
  // equal it; returns how many more of these are needed.
  int64_t KeepListed(uint32_t last, int64_t need) {
    // Locals: a byte that is written may be anything of this object.
    const uint32_t* keys = listed_;
    const uint32_t* places = places_;
    uint8_t* mask = span_.mask + start_;
    for (int64_t i = 0, number = number_; i < number; ++i) {
      const bool equal = (keys[i] == last) & (need > 0);
      need -= equal;
      mask[places[i]] |= equal | (keys[i] > last);
    }
    return need;
  }

  // Keeps what is above a key, and what equals it if so wished.
  void Keep(Rule rule, uint32_t last, bool equals) {
    ForBlocks(rule, [&](int64_t start, int64_t count) {
      const Room& b = room_;
      uint8_t* mask = span_.mask + start;
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t equal = b.candidates[i] & (b.keys[i] == last);
        mask[i] = b.kept[i] | (b.keys[i] > last) | (equal & equals);
      }
      return true;
    });
  }

  // Keeps the first `need` of those that equal a key; returns how many more
  // are needed.
  int64_t KeepFirst(Rule rule, uint32_t last, int64_t need) {
    ForBlocks(rule, [&](int64_t start, int64_t count) {
      for (int64_t i = 0; i < count && need > 0; ++i) {
        if (room_.candidates[i] && room_.keys[i] == last) {
          span_.mask[start + i] = 1;
          --need;
        }
      }
      return need > 0;
    });
    return need;
  }

 private:
  static constexpr int64_t kRun = 16, kLeastListed = 1 << 13;

  // Calls f(start, count) for every block, until it is false.
  template <typename F>
  void ForBlocks(Rule rule, F f) {
    for (int64_t start = start_; start < end_; start += kBlock) {
      const int64_t count = std::min(kBlock, end_ - start);
      Read(rule, start, count);
      if (!f(start, count)) return;
    }
  }

  void Read(Rule rule, int64_t start, int64_t count) {
    Room& b = room_;
    if (span_.among != nullptr) {
      const uint8_t* among = span_.among + start;
      for (int64_t i = 0; i < count; ++i) b.candidates[i] = among[i] != 0;
    } else {
      std::memset(b.candidates, 1, count);
    }
    if (rule.among_equals) {
      ReadScores(start, count, b.scores);
      for (int64_t i = 0; i < count; ++i) {
        b.kept[i] = b.candidates[i] & (b.scores[i] > rule.score);
        b.candidates[i] &= b.scores[i] == rule.score;
      }
    } else {
      std::memset(b.kept, 0, count);
    }
    if (rule.by_random_bits) {
      const uint32_t words[3] = {span_.words[0], span_.words[1],
                                 span_.words[0] ^ span_.words[1] ^ 0x1BD11BDA};
      const uint64_t position = span_.position + start;
      const auto high = static_cast<uint32_t>(position >> 32);
      const auto low = static_cast<uint32_t>(position);
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t at = low + static_cast<uint32_t>(i);
        b.keys[i] = RandomBits(words, high + (at < low), at);
      }
    } else {
      ReadScores(start, count, b.keys);
    }
    for (int64_t i = 0; i < count; ++i) b.keys[i] *= b.candidates[i];
  }

  void ReadScores(int64_t start, int64_t count, uint32_t* bits) const {
    if (span_.floats != nullptr) {
      const float* floats = span_.floats + start;
      const uint32_t read = span_.by_magnitude ? 0x7fffffff : 0xffffffff;
      for (int64_t i = 0; i < count; ++i) {
        bits[i] = SortableBits(floats[i], read);
      }
    } else {
      std::memcpy(bits, span_.integers + start, count * sizeof *bits);
    }
  }

  const Span& span_;
  const int64_t start_, end_, most_listed_;
  Room& room_;
  uint32_t* const listed_;  // Keys, and where they are in the part.
  uint32_t* const places_;
  int64_t number_ = 0, others_ = 0, above_ = 0;
};

}  // namespace
}  // namespace spdf
