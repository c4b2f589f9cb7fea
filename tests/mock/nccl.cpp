// A stand-in for libnccl: all-gather through shared memory, among processes of one machine, on host
// memory. A rank that waits for another one that is gone gets ncclSystemError after 20 s.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>

namespace {

constexpr size_t room = size_t{64} << 20;
enum Result { success = 0, system_error = 2, invalid_argument = 4, remote_error = 6 };

struct Shared {
  std::atomic<uint32_t> arrived, aborted, attached;
  char data[];
};

struct Communicator {
  Shared* shared;
  int ranks, rank;
  uint32_t meetings = 0;
  char name[64];

  // All ranks get here before one goes on.
  Result meet() {
    shared->arrived.fetch_add(1, std::memory_order_acq_rel);
    const uint32_t wanted = ++meetings * uint32_t(ranks);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (int32_t(shared->arrived.load(std::memory_order_acquire) - wanted) < 0) {
      if (shared->aborted.load(std::memory_order_acquire)) return remote_error;
      if (std::chrono::steady_clock::now() > end) return system_error;
      sched_yield();
    }
    return success;
  }
};

struct UniqueId {
  char bytes[128];
};

int close_communicator(Communicator* c) {
  if (c->shared->attached.fetch_sub(1, std::memory_order_acq_rel) == 1) shm_unlink(c->name);
  munmap(c->shared, sizeof(Shared) + room);
  delete c;
  return success;
}

}  // namespace

extern "C" {

int ncclGetUniqueId(UniqueId* id) {
  std::snprintf(id->bytes, sizeof id->bytes, "/attn-mock-nccl-%d", int(getpid()));
  return success;
}

int ncclCommInitRank(void** out, int ranks, UniqueId id, int rank) {
  auto c = new Communicator{};
  c->ranks = ranks;
  c->rank = rank;
  std::memcpy(c->name, id.bytes, sizeof c->name);
  const int file = shm_open(c->name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, off_t(sizeof(Shared) + room)) != 0) return system_error;
  void* at = mmap(nullptr, sizeof(Shared) + room, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return system_error;
  c->shared = static_cast<Shared*>(at);
  c->shared->attached.fetch_add(1, std::memory_order_acq_rel);
  *out = c;
  return c->meet();
}

int ncclAllGather(const void* mine, void* all, size_t count, int type, void* communicator, void*) {
  auto* c = static_cast<Communicator*>(communicator);
  if (type != 0 || count * size_t(c->ranks) > room) return invalid_argument;
  std::memcpy(c->shared->data + size_t(c->rank) * count, mine, count);
  if (const Result met = c->meet()) return met;
  std::memcpy(all, c->shared->data, count * size_t(c->ranks));
  return c->meet();
}

int ncclCommDestroy(void* communicator) {
  return close_communicator(static_cast<Communicator*>(communicator));
}
int ncclCommAbort(void* communicator) {
  static_cast<Communicator*>(communicator)->shared->aborted.store(1, std::memory_order_release);
  return close_communicator(static_cast<Communicator*>(communicator));
}
const char* ncclGetErrorString(int result) {
  switch (result) {
    case system_error:
      return "a rank did not come";
    case invalid_argument:
      return "more bytes than the stand-in has room for";
    case remote_error:
      return "another rank gave up";
  }
  return "no error";
}
}
