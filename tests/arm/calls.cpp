// The native kernels as a process of their own, on another processor: reads calls, and answers with what they return.
// Memory is the caller's.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include "calls.h"
#include "heap.h"

// Those that no other file of the kernels calls.
extern "C" {
void penstock_norm(int, const void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, const void*, int, float, int);
void penstock_route(const penstock::Experts*, const uint16_t*, int64_t, int64_t, int64_t*, float*, int);
void penstock_run_layers(const void*, int64_t, const void*);
int64_t penstock_quantised_bytes(const penstock::Weight*);
void penstock_quantised_pack(const penstock::Weight*, const uint8_t*, int64_t, int64_t, int64_t, const int64_t*, int);
int penstock_quantised_rows(const penstock::Weight*, const int64_t*, int64_t, int, void*, int);
}

namespace {

constexpr int MOST_ARGUMENTS = 16;

struct Call {
    char name[64];
    int64_t arguments[MOST_ARGUMENTS];  // addresses, whole numbers, and bits of float64
};

template <class T>
T argument(int64_t bits) {
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(bits);
    if constexpr (std::is_integral_v<T>) return static_cast<T>(bits);
    if constexpr (std::is_floating_point_v<T>) {
        double value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
}

template <class Result, class... T, size_t... I>
int64_t run(Result (*function)(T...), const int64_t* arguments, std::index_sequence<I...>) {
    static_assert(sizeof...(T) <= MOST_ARGUMENTS);
    if constexpr (std::is_void_v<Result>)
        return function(argument<T>(arguments[I])...), 0;
    else
        return function(argument<T>(arguments[I])...);
}

template <class Result, class... T>
int64_t run(Result (*function)(T...), const int64_t* arguments) {
    return run(function, arguments, std::index_sequence_for<T...>{});
}

int64_t run(const Call& call) {
#define PENSTOCK_RUN(function) if (!std::strcmp(call.name, #function)) return run(function, call.arguments)
    PENSTOCK_RUN(penstock_attend);
    PENSTOCK_RUN(penstock_norm);
    PENSTOCK_RUN(penstock_add_norm);
    PENSTOCK_RUN(penstock_silu_and_mul);
    PENSTOCK_RUN(penstock_place_heads);
    PENSTOCK_RUN(penstock_route);
    PENSTOCK_RUN(penstock_experts);
    PENSTOCK_RUN(penstock_run_layers);
    PENSTOCK_RUN(penstock_quantised_bytes);
    PENSTOCK_RUN(penstock_quantised_pack);
    PENSTOCK_RUN(penstock_quantised_rows);
    PENSTOCK_RUN(penstock_quantised_linear);
#undef PENSTOCK_RUN
    std::fprintf(stderr, "there is no %s\n", call.name);
    std::exit(1);
}

}  // namespace

// Is given the number of the heap's file.
int main(int, char** given) {
    void* const at = reinterpret_cast<void*>(HEAP_BEGIN);
    if (mmap(at, HEAP_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, std::atoi(given[1]), 0) != at) {
        std::perror("the shared heap");
        return 1;
    }
    for (Call call; std::fread(&call, sizeof call, 1, stdin) == 1;) {
        const int64_t result = run(call);
        if (std::fwrite(&result, sizeof result, 1, stdout) != 1 || std::fflush(stdout)) return 1;
    }
    return 0;
}
