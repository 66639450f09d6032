#include "base/error.h"

#include <system_error>

namespace hpkv {

void throw_system(std::string_view operation, std::string_view object, int code) {
  std::string message(operation);
  message.append(" ").append(object).append(": ").append(std::generic_category().message(code));
  throw Error(ErrorKind::system, message);
}

}  // namespace hpkv
