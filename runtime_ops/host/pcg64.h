// Numpy's PCG64 (O'Neill, PCG XSL-RR 128/64) behind numpy's SeedSequence: raw words that numpy promises never to change.
#pragma once

#include <cstdint>
#include <vector>

namespace host {

class Pcg64 {
 public:
  explicit Pcg64(const std::vector<uint64_t>& entropy) {
    uint64_t words[4];
    seed_words(entropy, words);
    increment_ = (static_cast<Wide>(words[2]) << 64 | words[3]) << 1 | 1;
    advance();
    state_ += static_cast<Wide>(words[0]) << 64 | words[1];
    advance();
  }

  uint64_t next() {
    advance();
    const auto high = static_cast<uint64_t>(state_ >> 64);
    const uint64_t mixed = high ^ static_cast<uint64_t>(state_);
    const unsigned turn = static_cast<unsigned>(high >> 58);
    return mixed >> turn | mixed << (-turn & 63);
  }

 private:
  using Wide = unsigned __int128;

  void advance() {
    constexpr Wide kMultiplier = static_cast<Wide>(0x2360ed051fc65da4) << 64 | 0x4385df649fccf645;
    state_ = state_ * kMultiplier + increment_;
  }

  // SeedSequence's running hash.
  struct Hash {
    uint32_t constant, multiplier;
    uint32_t mix(uint32_t value) {
      value ^= constant;
      constant *= multiplier;
      value *= constant;
      return value ^ value >> 16;
    }
  };

  static uint32_t mix(uint32_t x, uint32_t y) {
    const uint32_t result = 0xca01f9ddu * x - 0x4973f715u * y;
    return result ^ result >> 16;
  }

  static void seed_words(const std::vector<uint64_t>& entropy, uint64_t* out) {
    constexpr size_t kPool = 4;
    std::vector<uint32_t> words;
    for (const uint64_t value : entropy) {
      words.push_back(static_cast<uint32_t>(value));
      if (value >> 32 != 0) words.push_back(static_cast<uint32_t>(value >> 32));
    }
    Hash hash{0x43b0d7e5, 0x931e8875};
    uint32_t pool[kPool];
    for (size_t i = 0; i < kPool; ++i) pool[i] = hash.mix(i < words.size() ? words[i] : 0);
    for (size_t source = 0; source < kPool; ++source) {
      for (size_t target = 0; target < kPool; ++target) {
        if (source != target) pool[target] = mix(pool[target], hash.mix(pool[source]));
      }
    }
    for (size_t source = kPool; source < words.size(); ++source) {
      for (uint32_t& target : pool) target = mix(target, hash.mix(words[source]));
    }
    Hash last{0x8b51f9dd, 0x58f38ded};
    for (size_t i = 0; i < kPool; ++i) {
      const uint64_t low = last.mix(pool[2 * i % kPool]), high = last.mix(pool[(2 * i + 1) % kPool]);
      out[i] = low | high << 32;
    }
  }

  Wide state_ = 0, increment_ = 0;
};

}  // namespace host
