// Put before a process's own `malloc`: all that it allocates lies in one mapping, which the emulated processor has at
// the same address. So pointers mean the same to both.
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "heap.h"

namespace {

constexpr size_t LARGE = size_t(1) << 20;  // whose memory goes back to the system when they are freed

// Before each block. A chunk has 2^power bytes.
struct alignas(16) Header {
    char* chunk;
    int power;
};

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
int file = -1;
char* unused = nullptr;      // from here on, nothing was allocated yet
char* free_chunks[64] = {};  // by power, each with the address of the next in it

Header& header_of(void* block) { return static_cast<Header*>(block)[-1]; }

void map_heap() {
    file = memfd_create("heap", MFD_CLOEXEC);
    void* const at = reinterpret_cast<void*>(HEAP_BEGIN);
    constexpr int HOW = MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE;
    if (file < 0 || ftruncate(file, HEAP_BYTES) || mmap(at, HEAP_BYTES, PROT_READ | PROT_WRITE, HOW, file, 0) != at) {
        constexpr char SAID[] = "the shared heap cannot be mapped\n";
        (void)!write(2, SAID, sizeof SAID - 1);
        _exit(1);
    }
    unused = static_cast<char*>(at);
}

void* allocate(size_t alignment, size_t size, bool is_zero) {
    alignment = std::max(alignment, sizeof(Header));
    if (size > HEAP_BYTES / 4 || alignment > HEAP_BYTES / 4) {
        errno = ENOMEM;
        return nullptr;
    }
    int power = 6;
    while ((size_t(1) << power) < size + alignment + sizeof(Header)) ++power;
    pthread_mutex_lock(&mutex);
    if (!unused) map_heap();
    char* chunk = free_chunks[power];
    const bool is_used = chunk;
    if (chunk) {
        std::memcpy(&free_chunks[power], chunk, sizeof chunk);
    } else if (unused + (size_t(1) << power) <= reinterpret_cast<char*>(HEAP_BEGIN) + HEAP_BYTES) {
        chunk = unused;
        unused += size_t(1) << power;
    }
    pthread_mutex_unlock(&mutex);
    if (!chunk) {
        errno = ENOMEM;
        return nullptr;
    }
    const uintptr_t first = reinterpret_cast<uintptr_t>(chunk) + sizeof(Header);
    void* const block = reinterpret_cast<void*>((first + alignment - 1) / alignment * alignment);
    header_of(block) = {chunk, power};
    if (is_zero && is_used) std::memset(block, 0, size);
    return block;
}

}  // namespace

extern "C" {

// The file that the mapping is of.
int penstock_heap_file() { return file; }

void* malloc(size_t size) { return allocate(0, size, false); }
void* memalign(size_t alignment, size_t size) { return allocate(alignment, size, false); }
void* aligned_alloc(size_t alignment, size_t size) { return allocate(alignment, size, false); }
void* valloc(size_t size) { return allocate(4096, size, false); }
int posix_memalign(void** block, size_t alignment, size_t size) {
    *block = allocate(alignment, size, false);
    return *block ? 0 : ENOMEM;
}
void* calloc(size_t count, size_t size) {
    size_t total;
    if (__builtin_mul_overflow(count, size, &total)) total = SIZE_MAX;
    return allocate(0, total, true);
}
size_t malloc_usable_size(void* block) {
    if (!block) return 0;
    const Header& header = header_of(block);
    return header.chunk + (size_t(1) << header.power) - static_cast<char*>(block);
}
void free(void* block) {
    if (!block) return;
    const Header header = header_of(block);
    const size_t size = size_t(1) << header.power;
    // But for its first page, which holds the address of the next; chunks of this size begin with a page.
    if (size >= LARGE) {
        const uintptr_t second = (reinterpret_cast<uintptr_t>(header.chunk) + 8191) / 4096 * 4096;
        madvise(reinterpret_cast<void*>(second), (reinterpret_cast<uintptr_t>(header.chunk) + size - second) / 4096 * 4096,
                MADV_REMOVE);
    }
    pthread_mutex_lock(&mutex);
    std::memcpy(header.chunk, &free_chunks[header.power], sizeof header.chunk);
    free_chunks[header.power] = header.chunk;
    pthread_mutex_unlock(&mutex);
}
void* realloc(void* block, size_t size) {
    const size_t room = malloc_usable_size(block);
    if (block && size && size <= room) return block;
    void* const larger = size || !block ? allocate(0, size, false) : nullptr;
    if (larger && block) std::memcpy(larger, block, std::min(room, size));
    if (larger || !size) free(block);
    return larger;
}
}
