// Where the heap lies that a process shares with the processor that is emulated for it.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr uintptr_t HEAP_BEGIN = uintptr_t(0x2000) << 32;
constexpr size_t HEAP_BYTES = size_t(64) << 30;  // of which there are those that were written to
