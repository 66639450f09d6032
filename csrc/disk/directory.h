// The store's directory: its header, its lock, where its files are, and what a new store looks
// like.
//
// Owns: the attachment to the store (StoreLock) and the directory tree.
// Invariants: the header never changes; region_count * region_bytes + kStoreHeadBytes <=
// storage_bytes. Threads: opening is one thread's; afterwards everything is constant and safe.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "disk/files.h"
#include "disk/format.h"
#include "disk/namespace_files.h"
#include "disk/region_store.h"
#include "disk/store_lock.h"

namespace hpkv::disk {

// As Store::check_place says; takes no lock.
void check_place(const RegionStoreOptions& options, const std::shared_ptr<Files>& files);

class StoreDirectory {
 public:
  // Enters the store (nobody else can until settle()), creating it if need be. Throws as
  // RegionStore::open says.
  StoreDirectory(const RegionStoreOptions& options, const PoolInfo& pool,
                 std::shared_ptr<Files> files);

  // The pool's index says nothing about these files: it must be begun anew before settle().
  [[nodiscard]] bool index_is_stale() const noexcept { return lock_->alone() && lock_->stranger(); }
  void settle() { lock_->settle(); }
  [[nodiscard]] bool in_place() const noexcept { return lock_->in_place(); }
  void release() noexcept { lock_->release(); }

  [[nodiscard]] const StoreHeader& header() const noexcept { return header_; }
  [[nodiscard]] bool created() const noexcept { return created_; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::string regions_path() const { return path_ + "/regions"; }
  [[nodiscard]] std::string region_path(std::uint32_t region) const;
  [[nodiscard]] const NamespaceFiles& namespaces() const noexcept { return namespaces_; }

 private:
  void load_or_create(const RegionStoreOptions& options);
  void create(const RegionStoreOptions& options);
  void remove_strays();
  [[nodiscard]] bool probe_direct();

  std::shared_ptr<Files> files_;
  std::string path_;
  std::optional<StoreLock> lock_;
  NamespaceFiles namespaces_;
  StoreHeader header_;
  bool created_ = false;
  bool direct_ = false;
};

}  // namespace hpkv::disk
