// A pool client driven by lines on stdin: one command, one answer line. The crash rig and the races
// run several of them and kill or stop them at named points. A block's payload follows from its
// key, so whoever reads it knows what it must be. The table at the end lists the commands.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "disk/catalog.h"
#include "shm/format.h"
#include "shm/transfer.h"
#include "tests/points.h"

namespace hpkv {
namespace {

using Words = std::vector<std::string>;

constexpr std::array<const char*, 5> kStatusNames = {"ok", "present", "full", "busy", "off"};

void fill_payload(const Key& key, std::byte* out, std::uint64_t bytes) {
  auto* words = reinterpret_cast<std::uint64_t*>(out);
  for (std::uint64_t i = 0; i < bytes / 8; ++i)
    words[i] = key.words[i % 4] ^ (i * 0x9E3779B97F4A7C15U);
}

class Client {
 public:
  std::string run(const Words& words) {
    const auto command = commands().find(words[0]);
    if (command == commands().end()) return "error unknown command";
    try {
      return command->second(*this, words);
    } catch (const Error& error) {
      return "error " + std::string(kind_name(error.kind())) + " " + error.what();
    }
  }

 private:
  using Command = std::function<std::string(Client&, const Words&)>;
  static const std::map<std::string, Command>& commands();

  static Key key_of(const std::string& hex) {
    const auto key = parse_hex_key(hex);
    if (!key) throw Error(ErrorKind::argument, "bad key " + hex);
    return *key;
  }

  std::string open(const Words& w) {
    PoolOptions options;
    options.directory = w.at(1);
    if (w.at(2) != "-") options.pool_bytes = std::stoull(w.at(2));
    options.quarantine_ns = std::stoll(w.at(3)) * 1'000'000;
    options.maintenance = w.at(4) == "1";
    pool_ = Pool::open(options);
    return "slot " + std::to_string(pool_->info().slot) +
           (pool_->info().adopted ? " adopted" : " created");
  }

  std::string name_space(const Words& w) {
    NamespaceId id{};
    id[0] = static_cast<std::byte>(std::stoul(w.at(1)));
    const std::uint32_t index = pool_->add_namespace(id, {}, std::stoull(w.at(2)));
    return std::to_string(index);
  }

  std::string put_block(const Words& w) {
    const auto index = static_cast<std::uint32_t>(std::stoul(w.at(1)));
    const Key key = key_of(w.at(2));
    std::vector<std::byte> payload(pool_->block_bytes(index));
    fill_payload(key, payload.data(), payload.size());
    constexpr std::array<const char*, 5> kNames = {"stored", "present", "full", "busy", "off"};
    return kNames[static_cast<std::size_t>(put(*pool_, index, key, payload))];
  }

  // hit, miss, or WRONG: the bytes are not those of the key.
  std::string get_block(const Key& key, std::uint64_t bytes) {
    std::vector<std::byte> out(bytes);
    std::vector<std::byte> wanted(bytes);
    if (!get(*pool_, key, out)) return "miss";
    fill_payload(key, wanted.data(), wanted.size());
    return out == wanted ? "hit" : "WRONG";
  }

  // get INDEX KEY...: one word per key.
  std::string get_blocks(const Words& w) {
    const std::uint64_t bytes = pool_->block_bytes(static_cast<std::uint32_t>(std::stoul(w.at(1))));
    std::string out;
    for (std::size_t i = 2; i < w.size(); ++i)
      out += (i > 2 ? " " : "") + get_block(key_of(w[i]), bytes);
    return out;
  }

  static std::vector<Key> keys_from(const Words& w, std::size_t first) {
    std::vector<Key> keys;
    for (std::size_t i = first; i < w.size(); ++i) keys.push_back(key_of(w[i]));
    return keys;
  }

  std::string lookup(const Words& w) { return std::to_string(pool_->lookup(keys_from(w, 1))); }
  std::string touch(const Words& w) { return std::to_string(pool_->touch(keys_from(w, 1))); }

  std::string pin(const Words& w) {
    const std::vector<Key> keys = keys_from(w, 1);
    std::vector<BlockRef> refs(keys.size());
    const std::size_t count = pool_->pin(keys, refs);
    pinned_.insert(pinned_.end(), refs.begin(), refs.begin() + static_cast<std::ptrdiff_t>(count));
    return std::to_string(count);
  }

  std::string unpin(const Words&) {
    pool_->unpin(pinned_);
    pinned_.clear();
    return "done";
  }

  std::string condemn(const Words&) {
    for (const BlockRef& ref : pinned_) pool_->condemn(ref);
    return "done";
  }

  std::string reserve(const Words& w) {
    const Key key = key_of(w.at(2));
    BlockRef ref;
    const ReserveStatus status =
        pool_->reserve(static_cast<std::uint32_t>(std::stoul(w.at(1))), key, ref);
    if (status == ReserveStatus::ok) reserved_.emplace_back(key, ref);
    return kStatusNames[static_cast<std::size_t>(status)];
  }

  std::string publish(const Words&) {
    for (const auto& [key, ref] : reserved_) {
      fill_payload(key, pool_->payload(ref), ref.payload_bytes);
      pool_->publish(ref,
                     crc32c(std::span<const std::byte>(pool_->payload(ref), ref.payload_bytes)));
    }
    reserved_.clear();
    return "done";
  }

  std::string abandon(const Words&) {
    for (const auto& [key, ref] : reserved_) pool_->abandon(ref);
    reserved_.clear();
    return "done";
  }

  // Forks a "device": it outlives this process and writes into the block reserved last when the
  // next line comes.
  std::string device(const Words&) {
    const BlockRef ref = reserved_.back().second;
    const std::string path = pool_->info().path;
    if (::fork() != 0) return "";  // the child answers
    const int fd = ::open(path.c_str(), O_RDWR);
    void* block = ::mmap(nullptr, ref.payload_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                         static_cast<off_t>(ref.offset));
    std::printf("device ready\n");
    std::fflush(stdout);
    char byte = 0;
    while (::read(STDIN_FILENO, &byte, 1) == 1 && byte != '\n') {
    }
    std::memset(block, 0xEE, ref.payload_bytes);
    std::printf("device wrote\n");
    std::fflush(stdout);
    ::_exit(0);
  }

  // Reads FILE with O_DIRECT into the block reserved last, over and over, until killed.
  std::string direct_read(const Words& w) {
    const int fd = ::open(w.at(1).c_str(), O_RDONLY | O_DIRECT);
    if (fd < 0) return std::string("error open ") + std::strerror(errno);
    const BlockRef ref = reserved_.back().second;
    std::printf("reading\n");
    std::fflush(stdout);
    for (;;) {
      if (::pread(fd, pool_->payload(ref), ref.payload_bytes, 0) < 0)
        return std::string("error read ") + std::strerror(errno);
    }
  }

  std::string check(const Words&) {
    const std::vector<std::string> findings = pool_->check();
    std::string out = std::to_string(findings.size());
    for (const std::string& finding : findings) out += " | " + finding;
    return out;
  }

  std::string stats(const Words&) {
    const PoolStats s = pool_->stats();
    std::ostringstream out;
    out << "blocks=" << s.blocks << " writing=" << s.writing << " pinned=" << s.pinned
        << " quarantined=" << s.quarantined << " clients=" << s.clients << " epoch=" << s.epoch
        << " bad_checksums=" << s.bad_checksums << " lock_timeouts=" << s.lock_timeouts
        << " takeovers=" << s.takeovers << " rebuilds=" << s.rebuilds << " reaped=" << s.reaped
        << " evictions=" << s.evictions << " poisoned=" << s.poisoned;
    return out.str();
  }

  // attach REGIONS: the pool's store, without files.
  std::string attach(const Words& w) {
    catalog_ = std::make_unique<disk::Catalog>(pool_);
    catalog_->attach({}, static_cast<std::uint32_t>(std::stoul(w.at(1))), 1 << 20);
    return "attached";
  }

  static std::uint32_t mark_of(const Key& key) { return static_cast<std::uint32_t>(key.words[0]); }

  bool begin(std::uint32_t region, std::uint32_t capacity) {
    using enum disk::RegionState;
    const disk::RegionInfo info = catalog_->region(region);
    if (!catalog_->claim(region, info.state, dropping)) return false;
    if (catalog_->begin_region(region, info.file_generation + 1, 4096, capacity))
      return catalog_->claim(region, dropping, open);
    static_cast<void>(catalog_->settle(region, dropping, sealed));
    return false;
  }

  // region NUMBER CAPACITY: begins it anew, ours and open.
  std::string region(const Words& w) {
    return begin(static_cast<std::uint32_t>(std::stoul(w.at(1))),
                 static_cast<std::uint32_t>(std::stoul(w.at(2))))
               ? "open"
               : "refused";
  }

  ReserveStatus demote(std::uint32_t region, const Key& key, bool finish) {
    disk::DiskRef ref;
    const ReserveStatus status =
        catalog_->reserve(region, catalog_->region(region).used, indices_[0], key, ref);
    if (status == ReserveStatus::ok && finish) catalog_->publish(ref, mark_of(key));
    return status;
  }

  // demote REGION KEY...: one status each; write REGION KEY: leaves it in writing.
  std::string demote_blocks(const Words& w) {
    std::string out;
    for (std::size_t i = 2; i < w.size(); ++i) {
      const auto region = static_cast<std::uint32_t>(std::stoul(w[1]));
      const ReserveStatus status = demote(region, key_of(w[i]), w[0] == "demote");
      out += (i > 2 ? " " : "") + std::string(kStatusNames[static_cast<std::size_t>(status)]);
    }
    return out;
  }

  std::string seal(const Words& w) {
    using enum disk::RegionState;
    const auto region = static_cast<std::uint32_t>(std::stoul(w.at(1)));
    const bool done =
        catalog_->claim(region, open, sealing) && catalog_->settle(region, sealing, sealed);
    return done ? "sealed" : "refused";
  }

  // hit, miss, or WRONG: another block's entry.
  std::string find_on_disk(const Key& key) {
    disk::DiskRef ref;
    if (!catalog_->find(key, ref)) return "miss";
    return ref.key == key && ref.checksum == mark_of(key) ? "hit" : "WRONG";
  }

  std::string find_blocks(const Words& w) {
    std::string out;
    for (std::size_t i = 1; i < w.size(); ++i)
      out += (i > 1 ? " " : "") + find_on_disk(key_of(w[i]));
    return out;
  }

  // regions: one state each, 0 to 6 as in RegionState, with a star when somebody owns it.
  std::string regions(const Words&) {
    std::string out;
    for (std::uint32_t i = 0; i < catalog_->region_count(); ++i) {
      const disk::RegionInfo info = catalog_->region(i);
      out += std::to_string(static_cast<int>(info.state)) + (info.owned ? "* " : " ");
    }
    return out;
  }

  void disk_step(std::mt19937_64& random, const Key& key);

  std::string hits(const Words&) {
    std::string out;
    for (const auto& [name, count] : points::hit_counts())
      out += name + "=" + std::to_string(count) + " ";
    return out;
  }

  std::string workload(const Words& w);
  void step(std::mt19937_64& random, const std::vector<Key>& keys, std::uint64_t number_of_step);

  std::shared_ptr<Pool> pool_;
  std::unique_ptr<disk::Catalog> catalog_;
  std::vector<BlockRef> pinned_;
  std::vector<std::pair<Key, BlockRef>> reserved_;
  std::array<std::uint32_t, 2> indices_{};
};

// One random operation on the disk index. Region 0 is left alone.
void Client::disk_step(std::mt19937_64& random, const Key& key) {
  using enum disk::RegionState;
  const auto region = static_cast<std::uint32_t>(1 + random() % (catalog_->region_count() - 1));
  const disk::RegionInfo info = catalog_->region(region);
  disk::DiskRef ref;
  if (random() % 8 == 0) {
    if (find_on_disk(key) == "WRONG") throw Error(ErrorKind::system, "WRONG disk entry");
    if (!catalog_->find(key, ref)) return;
    catalog_->touch(std::span(&ref, 1));
    if (random() % 4 == 0) catalog_->forget(ref);
    return;
  }
  if (info.owned && !info.ours) return;
  if (info.state == open && !info.owned) {
    static_cast<void>(catalog_->claim(region, open, open));
  } else if (info.state == open && info.used == info.capacity) {
    static_cast<void>(catalog_->claim(region, open, sealing));
    static_cast<void>(catalog_->settle(region, sealing, sealed));
  } else if (info.state == open) {
    if (catalog_->reserve(region, info.used, indices_[0], key, ref) != ReserveStatus::ok) return;
    if (random() % 8 == 0) {
      catalog_->abandon(ref);
    } else {
      catalog_->publish(ref, mark_of(key));
    }
  } else if (random() % 16 == 0) {
    static_cast<void>(begin(region, static_cast<std::uint32_t>(16 << (random() % 5))));
  }
}

// One random operation. Two block sizes share the pool and take turns in being wanted, so segments
// change class.
void Client::step(std::mt19937_64& random, const std::vector<Key>& keys,
                  std::uint64_t number_of_step) {
  const std::size_t wanted = number_of_step / 2000 % 2;
  const std::size_t number =
      random() % std::min<std::uint64_t>(16 + number_of_step, keys.size() - 1) / 2 * 2 + wanted;
  const Key& key = keys[number];
  const std::uint32_t index = indices_[number % 2];
  const std::uint64_t bytes = pool_->block_bytes(index);
  const auto run = std::span(keys).subspan(number, std::min<std::size_t>(4, keys.size() - number));
  if (random() % 4 == 0) disk_step(random, key);
  switch (random() % 12) {
    case 0: {
      std::vector<BlockRef> refs(run.size());
      const std::size_t count = pool_->pin(run, refs);
      if (count > 0 && random() % 8 == 0) pool_->condemn(refs[0]);
      pool_->unpin(std::span<const BlockRef>(refs).first(count));
      return;
    }
    case 1:
      pool_->touch(run);
      return;
    case 2: {
      BlockRef ref;
      if (pool_->reserve(index, key, ref) == ReserveStatus::ok) pool_->abandon(ref);
      return;
    }
    case 3:
    case 4:
      if (get_block(key, bytes) == "WRONG") throw Error(ErrorKind::system, "WRONG bytes");
      return;
    case 5:
      if (random() % 1024 == 0) pool_->clear();
      if (random() % 8 == 0) pool_->maintain();
      return;
    default: {
      std::vector<std::byte> payload(bytes);
      fill_payload(key, payload.data(), bytes);
      static_cast<void>(put(*pool_, index, key, payload));
    }
  }
}

// workload SEED STEPS KEYS SMALL LARGE: random work over KEYS keys in two namespaces of these block
// sizes.
std::string Client::workload(const Words& w) {
  std::mt19937_64 random(std::stoull(w.at(1)));
  const std::uint64_t steps = std::stoull(w.at(2));
  std::mt19937_64 key_random(12345);  // all clients work on the same keys
  std::vector<Key> keys(std::stoull(w.at(3)));
  for (Key& key : keys) {
    for (std::uint64_t& word : key.words) word = key_random();
  }
  if (!catalog_) attach({"attach", "8"});
  for (std::size_t i = 0; i < 2; ++i) {
    NamespaceId id{};
    id[0] = static_cast<std::byte>(200 + i);
    indices_[i] = pool_->add_namespace(id, {}, std::stoull(w.at(4 + i)));
  }
  // Once an armed point was reached and survived, a little more work is enough.
  std::uint64_t after_point = points::armed() ? 100 : steps;
  for (std::uint64_t i = 0; i < steps && after_point > 0; ++i) {
    step(random, keys, i);
    if (!points::armed()) --after_point;
  }
  return "done";
}

const std::map<std::string, Client::Command>& Client::commands() {
  static const std::map<std::string, Command> table = {
      {"open", &Client::open},       // DIR BYTES|- QUARANTINE_MS MAINTENANCE(0|1)
      {"ns", &Client::name_space},   // ID_BYTE BLOCK_BYTES -> index
      {"put", &Client::put_block},   // INDEX KEY
      {"get", &Client::get_blocks},  // INDEX KEY... -> hit|miss|WRONG each
      {"lookup", &Client::lookup},
      {"touch", &Client::touch},
      {"pin", &Client::pin},  // KEY... -> count; kept until unpin
      {"unpin", &Client::unpin},
      {"condemn", &Client::condemn},  // all that is pinned
      {"reserve", &Client::reserve},  // INDEX KEY; kept until publish or abandon
      {"publish", &Client::publish},
      {"abandon", &Client::abandon},
      {"device", &Client::device},
      {"direct_read", &Client::direct_read},  // FILE
      {"workload", &Client::workload},
      {"attach", &Client::attach},         // REGIONS
      {"region", &Client::region},         // REGION CAPACITY
      {"demote", &Client::demote_blocks},  // REGION KEY... -> status each
      {"write", &Client::demote_blocks},   // the same, left in writing
      {"seal", &Client::seal},             // REGION
      {"find", &Client::find_blocks},      // KEY... -> hit|miss|WRONG each
      {"regions", &Client::regions},
      {"check", &Client::check},
      {"stats", &Client::stats},
      {"hits", &Client::hits},
      {"clear", [](Client& c, const Words&) { return std::to_string(c.pool_->clear()); }},
      {"maintain",
       [](Client& c, const Words&) {
         c.pool_->maintain();
         return std::string("done");
       }},
      {"arm",  // POINT HIT kill|stop
       [](Client&, const Words& w) {
         points::arm(w.at(1), std::stoi(w.at(2)), w.at(3) == "kill" ? SIGKILL : SIGSTOP);
         return std::string("armed");
       }},
      {"bug",
       [](Client&, const Words& w) {
         points::switch_bug(w.at(1));
         return std::string("on");
       }},
      {"close",
       [](Client& c, const Words&) {
         c.pool_->close();
         return std::string("closed");
       }},
      {"tid", [](Client&, const Words&) { return std::to_string(::gettid()); }},
  };
  return table;
}

}  // namespace
}  // namespace hpkv

int main() {
  hpkv::Client client;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream stream(line);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (words.empty()) continue;
    const std::string answer = client.run(words);
    if (answer.empty()) continue;
    std::printf("%s\n", answer.c_str());
    std::fflush(stdout);
  }
  return 0;
}
