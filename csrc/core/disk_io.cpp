// SPDX-License-Identifier: Apache-2.0
#include "disk_io.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__) && __has_include(<linux/fs.h>)
#include <linux/fs.h>
#endif
#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(IORING_FEAT_RW_CUR_POS) && defined(SYS_io_uring_setup)  // Linux 5.6, the first with IORING_OP_READ
#define HOTBED_URING
#endif
#endif

namespace hotbed {

Blocks allocate_blocks(size_t bytes) {
  void* blocks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (blocks == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_DONTFORK
  madvise(blocks, bytes, MADV_DONTFORK);
#endif
  return Blocks(static_cast<uint8_t*>(blocks), UnmapBlocks{bytes});
}

void UnmapBlocks::operator()(uint8_t* blocks) const noexcept { munmap(blocks, bytes); }

namespace {

bool pass_by_page_cache([[maybe_unused]] int descriptor) noexcept {
#if defined(O_DIRECT)
  return fcntl(descriptor, F_SETFL, O_DIRECT) == 0;
#elif defined(F_NOCACHE)
  return fcntl(descriptor, F_NOCACHE, 1) == 0;
#else
  return false;
#endif
}

// A file system that copies on write (btrfs) would need more room for each write than `allocate` gave.
void write_in_place([[maybe_unused]] int descriptor) noexcept {
#if defined(FS_IOC_GETFLAGS) && defined(FS_NOCOW_FL)
  int flags = 0;
  if (ioctl(descriptor, FS_IOC_GETFLAGS, &flags) != 0 || flags & FS_NOCOW_FL) return;
  flags |= FS_NOCOW_FL;
  ioctl(descriptor, FS_IOC_SETFLAGS, &flags);  // refused by most others, which need it not
#endif
}

}  // namespace

File::File(const std::string& folder, bool direct) : path_(folder + "/hotbed-store-XXXXXX") {
  descriptor_ = mkstemp(path_.data());
  if (descriptor_ < 0)
    throw std::system_error(errno, std::generic_category(), "store: cannot make a file in '" + folder + "'");
  unlink(path_.c_str());
  fcntl(descriptor_, F_SETFD, FD_CLOEXEC);
  write_in_place(descriptor_);
  direct_ = direct && pass_by_page_cache(descriptor_);
#ifdef POSIX_FADV_RANDOM
  if (!direct_) posix_fadvise(descriptor_, 0, 0, POSIX_FADV_RANDOM);
#endif
}

File::~File() { close(descriptor_); }

int64_t File::read(uint8_t* to, size_t bytes, uint64_t offset) {
  for (;;) {
    const ssize_t n = pread(descriptor_, to, bytes, static_cast<off_t>(offset));
    if (n >= 0) return n;
    if (errno != EINTR) return -errno;
  }
}

int64_t File::write(const uint8_t* from, size_t bytes, uint64_t offset) {
  for (;;) {
    const ssize_t n = pwrite(descriptor_, from, bytes, static_cast<off_t>(offset));
    if (n >= 0) return n;
    if (errno != EINTR) return -errno;
  }
}

int File::allocate(uint64_t offset, uint64_t bytes) {
  for (;;) {
#ifdef __linux__
    const int failed = fallocate(descriptor_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    // Some file systems cannot allocate: there a write tells that the disk is full.
    if (failed && errno == EOPNOTSUPP) return extend(offset + bytes);
    if (failed == 0) return 0;
    if (errno != EINTR) return -errno;
#else
    return extend(offset + bytes);
#endif
  }
}

int File::extend(uint64_t bytes) {
  struct stat now;
  if (fstat(descriptor_, &now) != 0) return -errno;
  if (static_cast<uint64_t>(now.st_size) >= bytes) return 0;
  return ftruncate(descriptor_, static_cast<off_t>(bytes)) ? -errno : 0;
}

int File::release([[maybe_unused]] uint64_t offset, [[maybe_unused]] uint64_t bytes) {
#if defined(FALLOC_FL_PUNCH_HOLE) && defined(FALLOC_FL_KEEP_SIZE)
  constexpr int kHole = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  while (fallocate(descriptor_, kHole, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0)
    if (errno != EINTR) return -errno;
  return 0;
#else
  return -EOPNOTSUPP;
#endif
}

uint64_t File::free_bytes() const noexcept {
  struct statvfs system;
  if (fstatvfs(descriptor_, &system) != 0) return 0;
  return static_cast<uint64_t>(system.f_bavail) * system.f_frsize;
}

namespace {

class ThreadEngine : public ReadEngine {
 public:
  ThreadEngine(File& file, BlockSource& source, int depth) {
    try {
      for (int i = 0; i < depth; i++) threads_.emplace_back([&file, &source] { work(file, source); });
    } catch (const std::system_error&) {  // fewer are slower
      if (threads_.empty()) throw;
    }
  }
  ~ThreadEngine() override {
    for (std::thread& thread : threads_) thread.join();
  }
  const char* name() const noexcept override { return "threads"; }

 private:
  static void work(File& file, BlockSource& source) {
    const Blocks buffer = allocate_blocks(kMostReadBytes);
    do {
      for (BlockRead read; source.next(read);)
        source.arrived(read, buffer.get(), file.read(buffer.get(), read.bytes, read.offset));
    } while (source.wait());
  }

  std::vector<std::thread> threads_;
};

#ifdef HOTBED_URING

// The two queues that a process shares with the kernel. One thread uses it.
class Ring {
 public:
  explicit Ring(unsigned depth) {
    io_uring_params params{};
#ifdef IORING_SETUP_DEFER_TASKRUN
    // Completions wait for `enter`: the thread that asks for them is not interrupted for each.
    params.flags = IORING_SETUP_R_DISABLED | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    descriptor_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    is_disabled_ = descriptor_ >= 0;
    if (!is_disabled_) params = {};  // before Linux 6.1
#endif
    if (descriptor_ < 0) descriptor_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "io_uring");
    constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;
    if ((params.features & kNeeded) != kNeeded) {
      close(descriptor_);
      throw std::system_error(ENOSYS, std::generic_category(), "io_uring of this kernel");
    }
    const size_t submissions = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t completions = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    queues_bytes_ = submissions > completions ? submissions : completions;
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    queues_ = map(queues_bytes_, IORING_OFF_SQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe*>(map(entries_bytes_, IORING_OFF_SQES));
    head_ = at(params.sq_off.head), tail_ = at(params.sq_off.tail), mask_ = *at(params.sq_off.ring_mask);
    order_ = at(params.sq_off.array);
    done_head_ = at(params.cq_off.head), done_tail_ = at(params.cq_off.tail), done_mask_ = *at(params.cq_off.ring_mask);
    done_ = reinterpret_cast<io_uring_cqe*>(queues_ + params.cq_off.cqes);
  }
  ~Ring() {
    munmap(queues_, queues_bytes_);
    munmap(entries_, entries_bytes_);
    close(descriptor_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // On the thread that will use it.
  void begin() noexcept {
    if (is_disabled_) syscall(SYS_io_uring_register, descriptor_, IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
  }
  void add_read(int file, uint8_t* to, const BlockRead& read, unsigned number) noexcept {
    const unsigned tail = *tail_, index = tail & mask_;
    io_uring_sqe& entry = entries_[index];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = IORING_OP_READ, entry.fd = file;
    entry.addr = reinterpret_cast<uint64_t>(to), entry.len = read.bytes, entry.off = read.offset;
    entry.user_data = number;
    order_[index] = index;
    __atomic_store_n(tail_, tail + 1, __ATOMIC_RELEASE);
  }
  // Submits what was added, and returns when `least` reads have come. 0, or the error number.
  int enter(unsigned least) noexcept {
    for (;;) {
      const unsigned added = *tail_ - __atomic_load_n(head_, __ATOMIC_ACQUIRE);
      if (syscall(SYS_io_uring_enter, descriptor_, added, least, IORING_ENTER_GETEVENTS, nullptr, 0) >= 0) return 0;
      if (errno != EINTR) return errno;
    }
  }
  // Calls refuse(number) for what was added and the kernel did not take.
  template <class F>
  void withdraw(F&& refuse) noexcept {
    const unsigned head = __atomic_load_n(head_, __ATOMIC_ACQUIRE);
    for (; *tail_ != head; --*tail_) refuse(static_cast<unsigned>(entries_[(*tail_ - 1) & mask_].user_data));
  }
  // Calls arrived(number, result) for each read that has come.
  template <class F>
  void reap(F&& arrived) noexcept {
    unsigned head = *done_head_;
    for (const unsigned tail = __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE); head != tail; head++) {
      const io_uring_cqe& entry = done_[head & done_mask_];
      arrived(static_cast<unsigned>(entry.user_data), static_cast<int64_t>(entry.res));
    }
    __atomic_store_n(done_head_, head, __ATOMIC_RELEASE);
  }

 private:
  uint8_t* map(size_t bytes, off_t what) {
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_, what);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    return static_cast<uint8_t*>(pages);
  }
  unsigned* at(unsigned offset) const noexcept { return reinterpret_cast<unsigned*>(queues_ + offset); }

  int descriptor_ = -1;
  bool is_disabled_ = false;  // until `begin`
  size_t queues_bytes_, entries_bytes_;
  uint8_t* queues_;
  io_uring_sqe* entries_;
  unsigned *head_, *tail_, mask_, *order_;
  unsigned *done_head_, *done_tail_, done_mask_;
  io_uring_cqe* done_;
};

class UringEngine : public ReadEngine {
 public:
  UringEngine(File& file, BlockSource& source, unsigned depth)
      : file_(file),
        source_(source),
        depth_(depth),
        ring_(depth),
        buffers_(allocate_blocks(size_t{depth} * kMostReadBytes)),
        reads_(depth) {
    for (unsigned i = 0; i < depth; i++) idle_.push_back(i);
    thread_ = std::thread([this] { work(); });
  }
  ~UringEngine() override { thread_.join(); }
  const char* name() const noexcept override { return "io_uring"; }

 private:
  uint8_t* buffer(unsigned number) const noexcept { return buffers_.get() + size_t{number} * kMostReadBytes; }

  void work() noexcept {
    ring_.begin();
    for (;;) {
      BlockRead read;
      while (!idle_.empty() && source_.next(read)) {
        const unsigned number = idle_.back();
        idle_.pop_back();
        reads_[number] = read;
        ring_.add_read(file_.descriptor(), buffer(number), read, number);
      }
      const unsigned running = depth_ - static_cast<unsigned>(idle_.size());
      if (running == 0) {
        if (!source_.wait()) return;
        continue;
      }
      // One call for several reads: a call costs as much as a read.
      const unsigned several = running > depth_ / 4 ? depth_ / 4 : running;
      const int error = ring_.enter(several > 0 ? several : 1);
      if (error != 0) refuse(error);
      ring_.reap([this](unsigned number, int64_t result) {
        const BlockRead& read = reads_[number];
        end(number, file_.arrived(buffer(number), read.bytes, read.offset, result));
      });
    }
  }
  void refuse(int error) noexcept {
    if (error == EAGAIN || error == EBUSY) return std::this_thread::yield();  // the kernel is short of memory
    ring_.withdraw([this, error](unsigned number) { end(number, -error); });
  }
  void end(unsigned number, int64_t result) noexcept {
    source_.arrived(reads_[number], buffer(number), result);
    idle_.push_back(number);
  }

  File& file_;
  BlockSource& source_;
  unsigned depth_;
  Ring ring_;
  Blocks buffers_;
  std::vector<BlockRead> reads_;
  std::vector<unsigned> idle_;
  std::thread thread_;
};

std::unique_ptr<ReadEngine> make_uring(File& file, BlockSource& source, int depth) {
  return std::make_unique<UringEngine>(file, source, static_cast<unsigned>(depth));
}

#else

std::unique_ptr<ReadEngine> make_uring(File&, BlockSource&, int) {
  throw std::system_error(ENOSYS, std::generic_category(), "io_uring");
}

#endif

}  // namespace

bool can_use_uring() noexcept {
#ifdef HOTBED_URING
  try {
    const Ring ring(1);
    return true;
  } catch (...) { return false; }
#else
  return false;
#endif
}

std::unique_ptr<ReadEngine> make_engine(EngineKind kind, File& file, BlockSource& source, int depth) {
  if (kind == EngineKind::kUring || (kind == EngineKind::kBest && can_use_uring()))
    return make_uring(file, source, depth ? depth : 128);
  return std::make_unique<ThreadEngine>(file, source, depth ? depth : 32);
}

}  // namespace hotbed
