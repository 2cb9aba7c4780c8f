#include "threads.h"

#include <pthread.h>
#include <signal.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "vectors.h"

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// How long a thread without work stays awake: longer than what lies between two products of a layer, and than others
// take for their last pieces. Where somebody else wants the processor, who stays awake loses its turn: the system lets
// in first, and on a processor that is free, who has slept.
constexpr Clock::duration AWAKE = microseconds(100), AWAKE_IN_A_CROWD = microseconds(5);
// So long, and as long as its own pieces took, the caller waits for those that others still have. Then it sleeps:
// whoever was put aside with a piece may be let in on its processor.
constexpr Clock::duration PATIENCE = microseconds(20);
// Who had to wait longer, beside what pieces take, waited for a thread that was put aside. Twice within a short time:
// others want the processors, for a while at least.
constexpr Clock::duration LONG_WAIT = microseconds(300);
constexpr Clock::duration TWICE_WITHIN = milliseconds(50), CROWD_LASTS = milliseconds(200);
// Workers keep off the caller's processor for longer: that costs nothing where nobody else wants one.
constexpr Clock::duration AWAY_LASTS = milliseconds(2000);
// Of what is left of a range, the part that is claimed at once: claims break the stream of reads from memory. None in a
// crowd, where whoever is put aside keeps all that it has claimed.
constexpr uint64_t PART = 4;
constexpr int LOOKS = 32;  // between two looks at the clock
constexpr int MOST_THREADS = 256;
constexpr int64_t MOST_PIECES = int64_t(1) << 22;

#ifdef __linux__
int this_cpu() { return sched_getcpu(); }

void sleep_while(std::atomic<uint32_t>* word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>* word, int num_threads) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, num_threads, nullptr, nullptr, 0);
}
#else
int this_cpu() { return -1; }  // threads cannot be told to keep off one

// Never destroyed, as the threads.
std::mutex& sleepers = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;

void sleep_while(std::atomic<uint32_t>* word, uint32_t value) {
    std::unique_lock<std::mutex> lock(sleepers);
    changed.wait(lock, [&] { return word->load() != value; });
}

void wake(std::atomic<uint32_t>*, int) {
    sleepers.lock();  // whoever has seen the value before is asleep by now
    sleepers.unlock();
    changed.notify_all();
}
#endif

// Pieces [next, end) of a job that nobody has claimed, as one word.
struct Range {
    uint32_t job;  // 20 bits of it
    uint64_t next, end;

    static Range of(uint64_t word) {
        return {uint32_t(word >> 44), word >> 22 & (MOST_PIECES - 1), word & (MOST_PIECES - 1)};
    }
    uint64_t word() const { return uint64_t(job) << 44 | next << 22 | end; }
};

// Threads that live as long as the process. One caller at a time gives them work and does its share. Each begins with a
// range of its own, whose memory is its processor's, and goes on with what others have left of theirs.
class Pool {
   public:
    void run(int64_t num_pieces, int64_t at_a_time, int num_threads, void (*run)(const void*, int64_t, int64_t),
             const void* work) {
        std::unique_lock<std::mutex> only(caller_, std::try_to_lock);
        if (!only) return run(work, 0, num_pieces);  // another caller has the threads
        start(num_threads - 1);
        run_.store(run, std::memory_order_relaxed);
        work_.store(work, std::memory_order_relaxed);
        at_a_time_.store(at_a_time, std::memory_order_relaxed);
        num_threads_.store(num_threads, std::memory_order_relaxed);
        num_left_.store(num_pieces, std::memory_order_relaxed);
        const auto began = Clock::now();
        const bool is_crowded = began < crowded_until_;
        part_.store(is_crowded ? MOST_PIECES : PART, std::memory_order_relaxed);
        awake_.store((is_crowded ? AWAKE_IN_A_CROWD : AWAKE).count(), std::memory_order_relaxed);
        const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
        for (int thread = 0; thread < num_threads; ++thread) {
            const Range range{job & 0xfffff, uint64_t(thread * num_pieces / num_threads),
                              uint64_t((thread + 1) * num_pieces / num_threads)};
            ranges_[thread].word.store(range.word(), std::memory_order_release);
        }
        crowded_cpu_.store(began < away_until_ ? this_cpu() : -1, std::memory_order_relaxed);
        job_.store(job);
        if (num_asleep_.load() > 0) wake(&job_, num_threads - 1);
        const int64_t num_done = take_part(0);
        if (num_left_.load(std::memory_order_acquire) == 0) return;
        const auto ended = Clock::now();
        const auto piece_time = num_done ? (ended - began) / num_done * at_a_time : Clock::duration(0);
        const auto patience = PATIENCE + (is_crowded ? 0 : 2) * piece_time;
        const auto is_done = [&] { return num_left_.load(std::memory_order_acquire) == 0; };
        if (is_soon(is_done, patience)) return;
        while (!is_soon(is_done, Clock::duration(0))) {
            is_waiting_.store(1);
            if (num_left_.load() != 0) sleep_while(&is_waiting_, 1);
            is_waiting_.store(0);
        }
        note_delay(ended, Clock::now(), piece_time);
    }

   private:
    struct alignas(64) OneRange {
        std::atomic<uint64_t> word{0};
    };

    void start(int num_workers) {
        while (num_workers_ < num_workers) {
            // Signals are for the threads that the program made.
            sigset_t all, before;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
            std::thread([this, number = num_workers_ + 1] { serve(number); }).detach();
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            ++num_workers_;
        }
    }

    // The caller has waited for pieces of others: far longer than a piece takes, where one of them was put aside.
    void note_delay(Clock::time_point began, Clock::time_point ended, Clock::duration piece_time) {
        if (ended - began < LONG_WAIT + 2 * piece_time) return;
        if (ended - put_aside_ < TWICE_WITHIN) crowded_until_ = ended + CROWD_LASTS, away_until_ = ended + AWAY_LASTS;
        put_aside_ = ended;
    }

    // In a crowd a worker keeps off the caller's processor: two of ours that take turns on one leave all of another to
    // somebody else, and the system sees nothing unjust in it.
    class Place {
       public:
#ifdef __linux__
        void choose(int crowded_cpu) {
            if (crowded_cpu < 0 ? !is_away_ : this_cpu() != crowded_cpu) return;
            if (!is_away_ && sched_getaffinity(0, sizeof(allowed_), &allowed_) != 0) return;
            cpu_set_t wanted = allowed_;
            if (crowded_cpu >= 0) CPU_CLR(crowded_cpu, &wanted);
            if (CPU_COUNT(&wanted) == 0 || sched_setaffinity(0, sizeof(wanted), &wanted) != 0) return;
            is_away_ = crowded_cpu >= 0;
        }

       private:
        cpu_set_t allowed_;  // before it kept off anything
        bool is_away_ = false;
#else
        void choose(int) {}
#endif
    };

    void serve(int number) {
        Place place;
        for (uint32_t seen = 0;; seen = job_.load()) {
            while (!is_soon([&] { return job_.load() != seen; }, Clock::duration(awake_.load(std::memory_order_relaxed)))) {
                num_asleep_.fetch_add(1);
                sleep_while(&job_, seen);
                num_asleep_.fetch_sub(1);
            }
            if (number >= num_threads_.load(std::memory_order_relaxed)) continue;
            place.choose(crowded_cpu_.load(std::memory_order_relaxed));
            take_part(number);
        }
    }

    // Claim pieces until there are none; returns how many. What is read of a job belongs to it where the claim succeeds:
    // as long as a piece is nobody's, the job is not over, and no other is written.
    int64_t take_part(int number) {
        const int num_threads = num_threads_.load(std::memory_order_relaxed);
        int64_t num_done = 0;
        for (int step = 0; step < num_threads; ++step) {
            std::atomic<uint64_t>& word = ranges_[(number + step) % num_threads].word;
            for (uint64_t before = word.load(std::memory_order_acquire);;) {
                Range range = Range::of(before);
                if (range.next >= range.end) break;
                const auto run = run_.load(std::memory_order_relaxed);
                const auto work = work_.load(std::memory_order_relaxed);
                const uint64_t num_left = range.end - range.next;
                const uint64_t part = num_left / part_.load(std::memory_order_relaxed);
                const uint64_t size =
                    std::min(num_left, std::max<uint64_t>(part, at_a_time_.load(std::memory_order_relaxed)));
                // Of its own the first, of another's the last: what each reads lies in a row.
                const uint64_t first = step ? range.end -= size : (range.next += size) - size;
                if (!word.compare_exchange_weak(before, range.word(), std::memory_order_acq_rel)) continue;
                run(work, first, first + size);
                num_done += size;
                before = word.load(std::memory_order_acquire);
            }
        }
        if (num_done && num_left_.fetch_sub(num_done) == num_done && is_waiting_.exchange(0)) wake(&is_waiting_, 1);
        return num_done;
    }

    // Whether it is so within a time in which the thread stays awake.
    template <class IsSo>
    static bool is_soon(const IsSo& is_so, Clock::duration awake) {
        const auto began = Clock::now();
        for (auto last = began; last - began < awake;) {
            for (int look = 0; look < LOOKS; ++look) {
                if (is_so()) return true;
                rest();
            }
            last = Clock::now();
        }
        return is_so();
    }

    std::mutex caller_;
    int num_workers_ = 0;
    std::atomic<void (*)(const void*, int64_t, int64_t)> run_{nullptr};
    std::atomic<const void*> work_{nullptr};
    std::atomic<int64_t> at_a_time_{1};
    std::atomic<uint64_t> part_{MOST_PIECES};
    std::atomic<int> num_threads_{0};
    std::atomic<Clock::rep> awake_{0};
    Clock::time_point put_aside_, crowded_until_, away_until_;  // the caller's
    std::atomic<int> crowded_cpu_{-1};  // the caller's processor, where others want one; -1: nobody does
    OneRange ranges_[MOST_THREADS];
    alignas(64) std::atomic<int64_t> num_left_{0};
    alignas(64) std::atomic<uint32_t> job_{0};
    alignas(64) std::atomic<int> num_asleep_{0};
    alignas(64) std::atomic<uint32_t> is_waiting_{0};
};

// Never destroyed: its threads may outlive the end of `main`. After a fork the child has none of them.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
    static const bool is_made = [] {
        pool.store(new Pool);
        pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool); });
        return true;
    }();
    (void)is_made;
    return *pool.load(std::memory_order_acquire);
}

// Torch's OpenMP: calls a function on so many threads, the caller among them. None: it was not told.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<Parallel> parallel{nullptr};

}  // namespace

void share(int64_t num_pieces, int64_t at_a_time, int num_threads, void (*run)(const void*, int64_t, int64_t),
           const void* work) {
    if (num_pieces <= 0) return;
    const bool is_torchs = num_threads < 0;
    const int64_t num_claims = (num_pieces + at_a_time - 1) / at_a_time;
    num_threads = std::min<int64_t>({std::abs(num_threads), MOST_THREADS, num_claims});
    if (num_threads <= 1) return run(work, 0, num_pieces);
    const Parallel torchs = parallel.load(std::memory_order_relaxed);
    if (!(is_torchs && torchs) && num_pieces < MOST_PIECES)
        return the_pool().run(num_pieces, at_a_time, num_threads, run, work);
    std::atomic<int64_t> next{0};
    auto claim = [&] {
        for (int64_t first; (first = next.fetch_add(at_a_time, std::memory_order_relaxed)) < num_pieces;)
            run(work, first, std::min(first + at_a_time, num_pieces));
    };
    if (!torchs) return claim();
    torchs([](void* data) { (*static_cast<decltype(claim)*>(data))(); }, &claim, num_threads, 0);
}

}  // namespace penstock

// `GOMP_parallel` of the OpenMP that torch has loaded.
extern "C" void penstock_use_openmp(penstock::Parallel torchs) {
    penstock::parallel.store(torchs, std::memory_order_relaxed);
}
