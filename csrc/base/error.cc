#include "base/error.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace hpkv {
namespace {

// What the user can do about it; empty where that depends.
std::string remedy_for(int code) {
  switch (code) {
    case EACCES:
    case EPERM:
      return "; user " + std::to_string(::geteuid()) +
             " may not do that: give it the right, or choose another place";
    case EROFS:
      return "; mount it writable, or choose another place";
    default:
      return {};
  }
}

}  // namespace

void throw_system(std::string_view operation, std::string_view object, int code) {
  std::string message(operation);
  message.append(" ").append(object).append(": ").append(std::generic_category().message(code));
  message.append(remedy_for(code));
  throw Error(ErrorKind::system, message);
}

}  // namespace hpkv
