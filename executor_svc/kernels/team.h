// Threads that share out work, made for a machine that they do not have for themselves.
//
// Whoever calls a kernel computes; helpers join when the system runs them. An operation is over when all its shares are
// done, not when all threads have arrived: so a helper that wakes late costs nothing. A thread that the system takes
// away in the middle of a share does not hold up the others either: when it takes far longer than shares do, they do the
// share again. That is allowed because a share writes what depends on its inputs alone, the same bits whoever computes
// it and however often.
//
// A thread that comes back may still write to what its operation wrote to. So memory is used again only after every
// thread has left the operations that it belonged to (`wait_until_left`), and a caller returns when all have left.
#pragma once

#include <immintrin.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

// Helpers, asleep while nothing is computed. One caller at a time.
class Pool {
 public:
  static Pool& get() {
    static Pool* pool = new Pool;  // never destroyed: its threads end with the process
    return *pool;
  }

  // Calls work(0) here and, on whichever helpers come, work(index) with index in [1, threads). Returns when all returned.
  template <typename Work>
  void run(int threads, const Work& work) {
    const std::lock_guard<std::mutex> one(callers_);
    if (threads == 1) return work(0);
    while (static_cast<int>(num_helpers_) < threads - 1) start_helper();
    work_ = &work;
    call_ = [](const void* of, int index) { (*static_cast<const Work*>(of))(index); };
    threads_ = threads;
    inside_.store(0, std::memory_order_release);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    called_.notify_all();
    work(0);
    inside_.fetch_or(kClosed, std::memory_order_acq_rel);
    for (int turn = 0; turn < kTurns; ++turn) {
      if (inside_.load(std::memory_order_acquire) == kClosed) return;
      _mm_pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    left_.wait(lock, [&] { return inside_.load(std::memory_order_acquire) == kClosed; });
  }

 private:
  static constexpr int kClosed = 1 << 30;  // nobody may enter; below it, how many helpers are inside
  static constexpr int kTurns = 1000;      // of waiting before sleep

  Pool() { inside_.store(kClosed); }

  void start_helper() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the process's own threads
    std::thread([this, index = ++num_helpers_] { help(index); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void help(int index) {
    for (uint64_t seen = 0;;) {
      wait_for_call(seen);
      seen = round_.load(std::memory_order_acquire);
      if (!enter()) continue;
      if (index < threads_) call_(work_, index);
      if (inside_.fetch_sub(1, std::memory_order_acq_rel) - 1 == kClosed) {
        const std::lock_guard<std::mutex> lock(mutex_);
        left_.notify_one();
      }
    }
  }

  void wait_for_call(uint64_t seen) {
    for (int turn = 0; turn < kTurns; ++turn) {
      if (round_.load(std::memory_order_acquire) != seen) return;
      _mm_pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    called_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
  }

  bool enter() {
    int inside = inside_.load(std::memory_order_acquire);
    do {
      if (inside & kClosed) return false;
    } while (!inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel));
    return true;
  }

  std::mutex callers_, mutex_;
  std::condition_variable called_, left_;
  std::atomic<uint64_t> round_{0};
  std::atomic<int> inside_;
  int num_helpers_ = 0, threads_ = 0;
  const void* work_ = nullptr;
  void (*call_)(const void*, int) = nullptr;
};

// One thread's way through the operations of a call. All threads pass the same ones in the same order.
struct Member {
  int index;          // of the thread
  int operation = 0;  // the next one
  int entered = 0;    // operations before this one were over when the thread came
};

class Team {
 public:
  Team(int threads, int num_operations) : operations_(num_operations), at_(threads) {}

  int size() const { return static_cast<int>(at_.size()); }

  Member enter(int index) {
    Member member{index};
    if (index > 0) member.entered = newest_.load();
    at_[index].operation.store(member.entered);  // in one order with the end of the operation that it enters
    return member;
  }

  void leave(const Member& member) { at_[member.index].operation.store(INT_MAX, std::memory_order_release); }

  // Whether the next operation is over: then nothing need be prepared for it.
  bool is_over(const Member& member) const {
    return operations_[member.operation].is_over.load(std::memory_order_acquire);
  }

  // Calls do_item(i) for each i in [0, count) on whichever thread is free, at least `grain` of them in a row. Returns
  // when all are done.
  template <typename DoItem>
  void share(Member& member, int64_t count, int64_t grain, const DoItem& do_item) {
    share_ahead(member, count, grain, [&](int64_t item, int64_t) { do_item(item); });
  }

  // The same with do_item(i, next): `next` is what this thread does next, so that memory can be fetched; `count` if
  // there is nothing.
  template <typename DoItem>
  void share_ahead(Member& member, int64_t count, int64_t grain, const DoItem& do_item) {
    Operation& operation = operations_[member.operation++];
    if (operation.is_over.load(std::memory_order_acquire)) return;
    begin(member);
    const int64_t each = std::max(grain, (count + kMaxShares - 1) / kMaxShares);
    const int shares = static_cast<int>((count + each - 1) / each);
    const auto do_share = [&](int share, int next) {
      stall();
      const int64_t end = std::min((share + 1) * each, count), behind = std::min(next * each, count);
      for (int64_t i = share * each; i < end; ++i) do_item(i, i + 1 < end ? i + 1 : behind);
      finish(operation, share, shares);
    };
    const auto take = [&] { return operation.next.fetch_add(1, std::memory_order_relaxed); };
    for (int share = take(), next; share < shares; share = next) {
      next = take();
      const uint64_t started = __rdtsc();
      do_share(share, next);
      operation.ticks.store(__rdtsc() - started, std::memory_order_relaxed);
    }
    if (shares == 0 || size() == 1 || wait(operation)) return;
    for (int share = 0; share < shares; ++share)
      if (!is_done(operation, share)) do_share(share, shares);
  }

  // Waits until every other thread has left the operations before that number.
  void wait_until_left(const Member& member, int64_t number) {
    publish(member, member.operation);
    for (int index = 0; index < size(); ++index)
      for (int turn = 0; index != member.index && at_[index].operation.load(std::memory_order_acquire) < number; ++turn) {
        if (turn < kTurns) _mm_pause();
        else std::this_thread::yield();
      }
  }

 private:
  static constexpr int kMaxShares = 256;
  static constexpr int kTurns = 1000;
  static constexpr uint64_t kPatience = 20'000, kLongPatience = 2'000'000;  // ticks of the processor's clock

  struct alignas(64) Operation {
    std::atomic<int> next{0}, num_done{0};
    std::atomic<uint64_t> ticks{0};  // that a share took
    std::atomic<uint64_t> done[kMaxShares / 64]{};
    std::atomic<bool> is_over{false};
  };
  struct alignas(64) Place {
    std::atomic<int> operation{INT_MAX};  // what the thread may still read and write; before it enters, nothing
  };

  // For tests: now and then a thread is away for long after it took a share.
  static void stall() {
#ifdef HOLDBACK_STALLS
    static std::atomic<unsigned> count{0};
    if (count.fetch_add(1, std::memory_order_relaxed) % HOLDBACK_STALLS == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(300));
#endif
  }

  void publish(const Member& member, int number) {
    if (number > member.entered) at_[member.index].operation.store(number, std::memory_order_release);
  }

  void begin(const Member& member) {
    const int number = member.operation - 1;
    publish(member, number);
    int newest = newest_.load(std::memory_order_relaxed);
    while (newest < number && !newest_.compare_exchange_weak(newest, number)) {
    }
  }

  static bool is_done(const Operation& operation, int share) {
    return operation.done[share / 64].load(std::memory_order_acquire) >> (share % 64) & 1;
  }

  static void finish(Operation& operation, int share, int shares) {
    const uint64_t bit = uint64_t{1} << (share % 64);
    if (operation.done[share / 64].fetch_or(bit, std::memory_order_acq_rel) & bit) return;
    if (operation.num_done.fetch_add(1, std::memory_order_acq_rel) + 1 == shares) operation.is_over.store(true);
  }

  // Returns whether the operation was over before it had taken far too long.
  static bool wait(const Operation& operation) {
    const uint64_t started = __rdtsc();
    for (int turn = 1;; ++turn) {
      if (operation.is_over.load(std::memory_order_acquire)) return true;
      _mm_pause();
      if (turn % 8) continue;
      const uint64_t ticks = operation.ticks.load(std::memory_order_relaxed);
      if (__rdtsc() - started > (ticks ? 2 * ticks + kPatience : kLongPatience)) return false;
    }
  }

  std::vector<Operation> operations_;
  std::vector<Place> at_;
  std::atomic<int> newest_{0};
};

// Calls work(team, member) on up to `threads` threads.
template <typename Work>
void with_team(int threads, int num_operations, const Work& work) {
  Team team(threads, num_operations);
  Pool::get().run(threads, [&](int index) {
    Member member = team.enter(index);
    work(team, member);
    team.leave(member);
  });
}
