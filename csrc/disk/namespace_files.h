// The descriptors of namespaces: one small msgpack file for each, named after its identity, that
// says in words what its blocks are. Recovery ignores blocks whose namespace has no file.
//
// Owns: the directory `namespaces`. Threads: safe (no state); may block on the disk.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "disk/files.h"
#include "shm/pool.h"

namespace hpkv::disk {

class NamespaceFiles {
 public:
  NamespaceFiles(std::shared_ptr<Files> files, std::string directory)
      : files_(std::move(files)), directory_(std::move(directory)) {}

  // Makes the file unless it is there; durable on return. 0 or -errno.
  [[nodiscard]] int ensure(const NamespaceInfo& info) const;
  // nullopt: no such file, or not a sound one.
  [[nodiscard]] std::optional<NamespaceInfo> load(const NamespaceId& id) const;
  // 0 or -errno; a file that is not there is fine.
  [[nodiscard]] int remove(const NamespaceId& id) const;
  [[nodiscard]] const std::string& directory() const noexcept { return directory_; }

 private:
  std::shared_ptr<Files> files_;
  std::string directory_;
};

}  // namespace hpkv::disk
