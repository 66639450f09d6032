// The power goes at every moment of a scripted workload, and takes any page that was not synced:
// the store must come back with exactly what docs/formats/store.md promises.
//   1. A block that was synced, and not evicted since, is found and served.
//   2. No wrong byte is served; of a region with a summary every block is sound.
//   3. A block is not found again once its region was begun anew.
// And at every moment of the workload itself: a file is reused or removed only after the index has
// forgotten its blocks. Three seeded bugs show that the rig sees each of these broken.
#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

#include "tests/memory_disk.h"
#include "tests/points.h"
#include "tests/store_rig.h"

namespace hpkv::test {

using disk::ReadOutcome;
using disk::RegionState;

constexpr std::uint64_t kSmallBlock = 4000;       // one page, and a partial one at its end
constexpr std::uint64_t kSmallStore = 1'835'008;  // 13 regions of 4 records
// Of the images, under a sanitizer, every so many: it makes them slow, and looks for other things.
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kEvery = 16;
#else
constexpr std::size_t kEvery = 1;
#endif
constexpr std::size_t kNever = static_cast<std::size_t>(-1);

// What is known after a step of the workload, by what was asked for and answered.
struct Moment {
  std::size_t changes = 0;  // of the disk so far
  std::map<Key, std::uint32_t, bool (*)(const Key&, const Key&)> places{
      [](const Key& a, const Key& b) { return a.words < b.words; }};  // key to region, in the index
  std::set<std::size_t> durable;  // numbers of keys that were synced and are in the index
};

class Workload {
 public:
  explicit Workload(const PoolOptions& pool) : pool_(pool) {
    CHECK(disk_->make_directory("/disk") == 0);  // whoever makes the parent also syncs it
    CHECK(disk_->sync_directory("") == 0);
    enter();
    created_ = disk_->change_count();
    disk_->set_observer([this](const DiskChange& change) { watch_order(change); });
    run();
    disk_->set_observer({});
    other_.reset();
    side_.reset();
  }

  std::vector<Key> keys = random_keys(130);
  std::vector<Moment> moments;
  std::vector<std::string> violations;

  [[nodiscard]] std::vector<DiskChange> changes() const { return disk_->changes(); }
  [[nodiscard]] std::size_t created() const { return created_; }

 private:
  void enter() {
    const StorePlace place{.directory = "/disk/store",
                           .files = files_,
                           .bytes = kSmallStore,
                           .block_bytes = kSmallBlock};
    side_.emplace(pool_, place);
    other_.emplace(pool_, place);
  }
  void run() {
    note(false);
    const std::uint32_t each = side_->records_per_region();
    const std::size_t places = std::size_t{each} * side_->store->info().region_count;
    for (std::size_t step = 0; next_ + 7 < keys.size(); ++step) {
      append(*side_, 1 + step % 3);
      append(*other_, step % 3 == 0 ? 4 : 1);
      if (step % 5 == 2) sync();
      if (step == 3 || step == 7) seal_nearly();
      // In every region something is worth carrying over.
      for (std::size_t key = 0; key < next_; key += 3) touch(key);
      if (next_ > places + each && step % 9 == 0) shrink();
    }
    sync();
    // Else it would not have tried what it is for.
    const disk::StoreCounters counters = side_->store->counters();
    CHECK(counters.carried_blocks > 0 && counters.regions_removed > 0);
    CHECK(counters.regions_evicted > counters.regions_removed);
  }
  void append(StoreSide& side, std::size_t count) {
    CHECK(side.append(std::span(keys).subspan(next_, count)).written == count);
    next_ += count;
    CHECK(side_->pool->clear() > 0);
    note(false);
  }
  void sync() {
    CHECK(side_->store->sync_aged(true) == 0 && other_->store->sync_aged(true) == 0);
    note(true);
  }
  // Both leave and come back. Of the two regions that they left open one is sealed before it is
  // full, all but for the last sync, and then gone on with.
  void seal_nearly() {
    const auto keep = Pool::open(pool_);
    side_.reset();
    other_.reset();
    enter();
    files_->set_hook(no_sync_after_a_write());
    CHECK(side_->store->tend() == EIO && side_->regions_in(RegionState::open) == 2);
    files_->set_hook({});
    note(true);
  }
  void touch(std::size_t key) {
    disk::DiskRef ref;
    if (side_->catalog->find(keys[key], ref)) side_->catalog->touch(std::span(&ref, 1));
  }
  void shrink() {
    disk_->set_available(1);
    CHECK(side_->store->tend() == 0);
    disk_->set_available(std::uint64_t{1} << 40U);
    note(false);
  }

  void note(bool everything_synced) {
    Moment moment;
    moment.changes = disk_->change_count();
    for (std::size_t i = 0; i < next_; ++i) {
      disk::DiskRef ref;
      if (!side_->catalog->find(keys[i], ref)) continue;
      moment.places[keys[i]] = ref.region;
      const bool was = !moments.empty() && moments.back().durable.contains(i);
      const bool sealed = side_->catalog->region(ref.region).state == RegionState::sealed;
      if (everything_synced || was || sealed) moment.durable.insert(i);
    }
    moments.push_back(std::move(moment));
  }

  // A region's file may change its use only when the index knows nothing in it.
  void watch_order(const DiskChange& change) {
    if (change.path.find("/regions/") == std::string::npos) return;
    const bool header = change.kind == DiskChange::Kind::write && change.pages.size() == 1 &&
                        change.pages[0].first < 2;
    const bool removal = change.kind == DiskChange::Kind::unlink ||
                         (change.kind == DiskChange::Kind::length && change.bytes == 0);
    if (!header && !removal) return;
    const auto region =
        static_cast<std::uint32_t>(std::stoul(change.path.substr(change.path.rfind('/') + 1)));
    std::vector<disk::DiskRef> refs;
    side_->catalog->entries(region, refs);
    if (!refs.empty())
      violations.push_back("reused while the index had its blocks: " + change.path);
  }

  const PoolOptions pool_;
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>();
  std::shared_ptr<FaultyFiles> files_ = std::make_shared<FaultyFiles>(disk_);
  std::optional<StoreSide> side_;
  std::optional<StoreSide> other_;  // another process of the same pool
  std::size_t created_ = 0;
  std::size_t next_ = 0;
};

// The change that makes a region's new contents last, looked for from `begin` on: its new header
// synced, and, if the file is a new one, its name too.
std::size_t begun_anew(const std::vector<DiskChange>& changes, std::size_t begin,
                       std::uint32_t region) {
  std::array<char, 32> name{};
  std::snprintf(name.data(), name.size(), "/%05u.hpkv", region);
  bool header = false;
  bool content = false;
  bool removed = false;
  for (std::size_t i = begin; i < changes.size(); ++i) {
    const DiskChange& change = changes[i];
    if (change.kind == DiskChange::Kind::sync_directory) removed = removed && !content;
    if (change.path.ends_with(name.data())) {
      removed = removed || change.kind == DiskChange::Kind::unlink;
      header = header || (change.kind == DiskChange::Kind::write && change.pages[0].first < 2);
      content = content || (header && change.kind == DiskChange::Kind::sync);
    }
    if (content && !removed) return i + 1;
  }
  return kNever;
}

// For each key: the number of changes from which on it may not be found any more.
std::vector<std::size_t> gone_from(const Workload& work, const std::vector<DiskChange>& changes) {
  std::vector<std::size_t> gone(work.keys.size(), kNever);
  for (std::size_t m = 1; m < work.moments.size(); ++m) {
    for (const auto& [key, region] : work.moments[m - 1].places) {
      if (work.moments[m].places.contains(key)) continue;
      const auto at = std::find(work.keys.begin(), work.keys.end(), key) - work.keys.begin();
      gone[static_cast<std::size_t>(at)] = begun_anew(changes, work.moments[m - 1].changes, region);
    }
  }
  return gone;
}

// One pool looks at every image: each names another pool in LOCK, so the index begins anew.
class Checker {
 public:
  Checker(const Workload& work, const PoolOptions& pool, bool stop_early)
      : work_(work),
        pool_(pool),
        keep_(Pool::open(pool)),
        stop_early_(stop_early),
        changes_(work.changes()),
        gone_(gone_from(work, changes_)) {}

  // Every image of every moment; returns what was found wrong.
  std::vector<std::string> run() {
    PowerLoss power;
    std::size_t moment = 0;
    for (std::size_t i = 0; i < changes_.size(); ++i) {
      power.apply(changes_[i]);
      const std::size_t done = i + 1;
      if (done < work_.created()) continue;
      while (moment + 1 < work_.moments.size() && work_.moments[moment + 1].changes <= done) {
        ++moment;
      }
      power.each_image([&](const DiskImage& image) {
        if (stop_early_ && !findings_.empty()) return;
        if (++images_ % kEvery != 0 && !stop_early_) return;
        check_image(image, moment, done);
      });
    }
    return findings_;
  }
  [[nodiscard]] std::size_t images() const { return images_; }
  [[nodiscard]] std::size_t served() const { return served_; }

 private:
  void check_image(const DiskImage& image, std::size_t moment, std::size_t done) {
    StorePlace place{.directory = "/disk/store",
                     .files = std::make_shared<MemoryDisk>(image),
                     .bytes = kSmallStore,
                     .block_bytes = kSmallBlock};
    StoreSide side(pool_, place);
    side.recover_all();
    const std::string where =
        " after change " + std::to_string(done) + ", image " + std::to_string(images_);
    for (std::size_t i = 0; i < work_.keys.size(); ++i) {
      disk::DiskRef ref;
      const bool found = side.catalog->find(work_.keys[i], ref);
      const bool summarized =
          found && side.catalog->region(ref.region).state == RegionState::sealed;
      const bool served = found && side.serves(work_.keys[i]);  // compares the bytes
      served_ += served ? 1 : 0;
      if (!served && must_be_there(i, moment)) {
        findings_.push_back("synced block " + std::to_string(i) + " is lost" + where);
      }
      if (summarized && !served) {
        findings_.push_back("summary names broken block " + std::to_string(i) + where);
      }
      if (found && done >= gone_[i]) {
        findings_.push_back("evicted block " + std::to_string(i) + " is back" + where);
      }
    }
    if (images_ % 64 == 0) {
      const Key fresh = random_keys(1, images_ + 1000)[0];
      if (side.append_one(fresh).written != 1 || !side.serves(fresh)) {
        findings_.push_back("nothing can be written" + where);
      }
      require_sound(*side.pool);
    }
  }
  // Synced before the step that the power cut, and not evicted by it.
  [[nodiscard]] bool must_be_there(std::size_t key, std::size_t moment) const {
    const bool last = moment + 1 >= work_.moments.size();
    return work_.moments[moment].durable.contains(key) &&
           (last || work_.moments[moment + 1].durable.contains(key));
  }

  const Workload& work_;
  PoolOptions pool_;
  std::unique_ptr<Pool> keep_;
  bool stop_early_;
  std::vector<DiskChange> changes_;
  std::vector<std::size_t> gone_;
  std::vector<std::string> findings_;
  std::size_t images_ = 0;
  std::size_t served_ = 0;
};

std::vector<std::string> findings_with(const char* bug) {
  const Folder folder;
  points::clear_bugs();
  if (bug != nullptr) points::switch_bug(bug);
  const Workload work(folder.options());
  std::vector<std::string> findings = work.violations;
  Checker checker(work, other_pool(folder, "second"), bug != nullptr);
  if (findings.empty() || bug == nullptr) {
    const auto more = checker.run();
    findings.insert(findings.end(), more.begin(), more.end());
  }
  points::clear_bugs();
  std::printf("        %zu changes, %zu images, %zu blocks served, %zu findings\n",
              work.changes().size(), checker.images(), checker.served(), findings.size());
  for (std::size_t i = 0; i < findings.size() && i < 3; ++i) {
    std::printf("        %s\n", findings[i].c_str());
  }
  return findings;
}

TEST(a_power_loss_at_any_moment_leaves_what_the_format_promises) {
  CHECK(findings_with(nullptr).empty());
}

TEST(a_power_loss_while_a_store_is_made_leaves_one_that_can_be_opened) {
  const Folder folder;
  const auto disk = std::make_shared<MemoryDisk>();
  StorePlace place{
      .directory = "/disk/store", .files = disk, .bytes = kSmallStore, .block_bytes = kSmallBlock};
  CHECK(disk->make_directory("/disk") == 0);
  CHECK(disk->sync_directory("") == 0);
  const auto keys = random_keys(2);
  {
    StoreSide side(folder.options(), place);
    CHECK(side.append_one(keys[0]).written == 1);
  }
  PowerLoss power;
  std::size_t images = 0;
  for (const DiskChange& change : disk->changes()) {
    power.apply(change);
    power.each_image([&](const DiskImage& image) {
      if (!image.names.contains("/disk")) return;
      ++images;
      place.files = std::make_shared<MemoryDisk>(image);
      PoolOptions pool = other_pool(folder, "another");
      {
        StoreSide side(pool, place);
        side.recover_all();
        if (side.on_disk(keys[0])) static_cast<void>(side.serves(keys[0]));
        CHECK(side.append_one(keys[1]).written == 1 && side.serves(keys[1]));
      }
      std::filesystem::remove_all(pool.directory);
    });
  }
  std::printf("        %zu images\n", images);
  CHECK(images > 50);
}

TEST(the_rig_sees_a_summary_that_is_written_before_its_blocks_are_synced) {
  CHECK(!findings_with("summary_before_sync").empty());
}

TEST(the_rig_sees_records_without_a_generation) {
  CHECK(!findings_with("no_record_generation").empty());
}

TEST(the_rig_sees_a_file_that_goes_before_the_index_forgets_it) {
  CHECK(!findings_with("reuse_before_forget").empty());
}

}  // namespace hpkv::test

TEST_MAIN
