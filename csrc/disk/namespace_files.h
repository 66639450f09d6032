// The descriptors of namespaces: one small msgpack file for each, named after its identity, that
// says in words what its blocks are. Recovery ignores blocks whose namespace has no file.
//
// Owns: the directory `namespaces`. Threads: safe (no state); may block on the disk.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "disk/files.h"
#include "shm/pool.h"

namespace hpkv::disk {

class NamespaceFiles {
 public:
  NamespaceFiles(std::shared_ptr<Files> files, std::string directory)
      : files_(std::move(files)), directory_(std::move(directory)) {}

  // 0 when the file is there, else -errno.
  [[nodiscard]] int exists(const NamespaceId& id) const;
  // Makes or replaces the file; durable on return. 0 or -errno.
  [[nodiscard]] int write(const NamespaceInfo& info) const;
  // Removes every file whose identity is not in `kept()`, which is asked after the files are
  // listed, so that what is described meanwhile stays: there are at most as many as a pool knows
  // namespaces, within the space that is set aside for them.
  void prune(const std::function<std::vector<NamespaceId>()>& kept) const;
  // nullopt with `code` 0: there is no such file, or not a sound one. With -errno: the disk failed,
  // and nobody can say.
  [[nodiscard]] std::optional<NamespaceInfo> load(const NamespaceId& id, int& code) const;
  // 0 or -errno; a file that is not there is fine.
  [[nodiscard]] int remove(const NamespaceId& id) const;
  [[nodiscard]] const std::string& directory() const noexcept { return directory_; }

 private:
  std::shared_ptr<Files> files_;
  std::string directory_;
};

}  // namespace hpkv::disk
