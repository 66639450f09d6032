// The one exception type of the core: the world failed (a system call, a file that is not what it
// should be, a bad argument). Expected outcomes (miss, full, busy, bad checksum) are return values
// and never throw. A broken invariant of our own is neither: it poisons the pool (see shm/pool.h).
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace hpkv {

// The reason in one word. Python sees it as `PoolError.kind`, so the words are stable.
enum class ErrorKind {
  missing,     // there is no pool and the caller did not ask to create one
  garbage,     // the file is not a pool, or a pool that is damaged beyond use
  owner,       // the file or its directory belongs to somebody else, or others may write to it
  size,        // another explicit size than the pool has, or a size no pool can have
  space,       // the file system or a memory limit cannot hold the pool
  version,     // a pool of another version with clients attached
  poisoned,    // a poisoned pool with clients attached
  slots,       // no client slot is free
  store,       // the pool belongs to another store, or the store to another pool
  namespaces,  // the namespace table is full, or a namespace contradicts the one stored
  argument,    // the caller broke the contract of the call
  system,      // any other failed system call
};

[[nodiscard]] constexpr std::string_view kind_name(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::missing:
      return "missing";
    case ErrorKind::garbage:
      return "garbage";
    case ErrorKind::owner:
      return "owner";
    case ErrorKind::size:
      return "size";
    case ErrorKind::space:
      return "space";
    case ErrorKind::version:
      return "version";
    case ErrorKind::poisoned:
      return "poisoned";
    case ErrorKind::slots:
      return "slots";
    case ErrorKind::store:
      return "store";
    case ErrorKind::namespaces:
      return "namespaces";
    case ErrorKind::argument:
      return "argument";
    case ErrorKind::system:
      return "system";
  }
  return "system";
}

class Error : public std::runtime_error {
 public:
  // `message` names the operation, the object, the value seen and the remedy.
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}

  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

// Throws Error{system} with "operation object: strerror(code)".
[[noreturn]] void throw_system(std::string_view operation, std::string_view object, int code);

}  // namespace hpkv
