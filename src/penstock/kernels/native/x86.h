// What the sets for x86 share: single values of float16, and what threads need of the processor and of its systems.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifdef __GLIBC__
// As systems have had them since 2002: the library runs on older ones than that it was compiled on.
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.2.5");
#endif

namespace penstock {

inline float float_of_half(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t half_of_float(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Between two looks of a thread that waits.
inline void rest() { _mm_pause(); }

}  // namespace penstock
