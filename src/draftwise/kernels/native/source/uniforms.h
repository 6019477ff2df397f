// The random numbers of draftwise.core.random: Philox4x32-10 (Salmon et al. 2011).

#pragma once

#include <cstdint>

namespace {

struct PhiloxBlock {
    uint32_t word[4];
};

inline PhiloxBlock philox(PhiloxBlock counter, uint32_t key_low, uint32_t key_high) {
    uint32_t *c = counter.word;
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = (uint64_t)0xD2511F53 * c[0], second = (uint64_t)0xCD9E8D57 * c[2];
        const uint32_t next[] = {(uint32_t)(second >> 32) ^ c[1] ^ key_low, (uint32_t)second,
                                 (uint32_t)(first >> 32) ^ c[3] ^ key_high, (uint32_t)first};
        for (int i = 0; i < 4; ++i) c[i] = next[i];
        key_low += 0x9E3779B9;
        key_high += 0xBB67AE85;
    }
    return counter;
}

// Writes the numbers of the three streams of step_uniforms, request by request: one per drafted
// token, one at the position and at each of num_tokens later ones, and one per drafted token for the
// middle stage. drawing and accepting are [requests, 3 * num_tokens + 1].
inline void step_uniforms(const uint64_t *seeds, const int64_t *positions, int64_t num_requests,
                          int64_t num_tokens, double *drawing, float *accepting) {
    for (int64_t request = 0; request < num_requests; ++request) {
        const uint32_t low = (uint32_t)seeds[request], high = (uint32_t)(seeds[request] >> 32);
        for (int64_t i = 0; i < 3 * num_tokens + 1; ++i) {
            const uint32_t stream = i < num_tokens ? 0 : i <= 2 * num_tokens ? 1 : 2;
            const int64_t place = stream == 0   ? i
                                  : stream == 1 ? i - num_tokens
                                                : i - 2 * num_tokens - 1;
            // The second word is the position. It counts on in the stream of later positions.
            const uint32_t offset = stream == 1 ? 0 : (uint32_t)place;
            const uint32_t position =
                (uint32_t)positions[request] + (stream == 1 ? (uint32_t)place : 0);
            const PhiloxBlock words = philox({{offset, position, stream, 0}}, low, high);
            const uint64_t bits = (uint64_t)words.word[0] << 32 | words.word[1];
            *drawing++ = (double)(bits >> 11) * 0x1p-53;
            *accepting++ = (float)(words.word[2] >> 8) * 0x1p-24f;
        }
    }
}

}  // namespace
