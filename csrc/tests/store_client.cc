// A client of pool and store driven by lines on stdin: one command, one answer line, like
// pool_client. It can be told to die at the n-th call of the file system from now, before or after
// the call. A block's payload follows from its key. The table at the end lists the commands.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#include <sstream>

#include "disk/store.h"
#include "tests/faulty_files.h"
#include "tests/pool_rig.h"

namespace hpkv::test {
namespace {

using Words = std::vector<std::string>;

constexpr std::uint64_t kBlock = 60'000;

class StoreClient {
 public:
  std::string run(const Words& words) {
    const auto command = commands().find(words[0]);
    if (command == commands().end()) return "error unknown command";
    try {
      return command->second(*this, words);
    } catch (const std::exception& error) {
      return std::string("error ") + error.what();
    }
  }

 private:
  using Command = std::function<std::string(StoreClient&, const Words&)>;
  static const std::map<std::string, Command>& commands();

  std::string open(const Words& w) {
    PoolOptions options;
    options.directory = w.at(1);
    options.pool_bytes = 16 * kMiB;
    options.quarantine_ns = 0;
    options.maintenance = false;
    pool_ = Pool::open(options);
    index_ = pool_->add_namespace(identity(1), {}, kBlock);
    keys_ = random_keys(std::stoull(w.at(4)), 4711);
    disk::StoreOptions store;
    store.directory = w.at(2);
    store.storage_bytes = std::stoull(w.at(3));
    store.block_bytes = kBlock;
    store.background = w.at(5) == "1";
    store.files = files_;
    store_ = disk::Store::open(pool_, store);
    return "open";
  }

  // die CALL|any N: before the N-th such call of the file system from now.
  std::string die(const Words& w) {
    static const std::map<std::string, FileCall> kCalls = {{"write", FileCall::write},
                                                           {"read", FileCall::read},
                                                           {"sync", FileCall::sync},
                                                           {"reserve", FileCall::reserve}};
    const bool any = w.at(1) == "any";
    const FileCall fatal = any ? FileCall::open : kCalls.at(w.at(1));
    auto left = std::make_shared<std::atomic<std::int64_t>>(std::stoll(w.at(2)));
    files_->set_hook([any, fatal, left](FileCall call, const std::string&) {
      if ((any || call == fatal) && left->fetch_sub(1) == 1) ::kill(::getpid(), SIGKILL);
      return 0;
    });
    return "armed";
  }

  bool right_or_gone(const Key& key, bool& wrong) {
    std::vector<std::byte> out(kBlock);
    if (!get(*pool_, key, out)) return false;
    if (out != payload_of(key, kBlock)) wrong = true;
    return true;
  }

  // serve: brings every key into the pool that can be had; the numbers of those, or WRONG.
  std::string serve(const Words&) {
    std::string out;
    bool wrong = false;
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      const auto ticket = store_->promote(index_, {keys_[i]});
      if (!ticket->wait(std::chrono::seconds(60))) return "error a ticket does not end";
      if (right_or_gone(keys_[i], wrong)) out += std::to_string(i) + " ";
    }
    return wrong ? "WRONG" : out;
  }

  // on_disk: the numbers of the keys in the index of the store.
  std::string on_disk(const Words&) {
    const disk::Catalog catalog(pool_);
    std::string out;
    disk::DiskRef ref;
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      if (catalog.find(keys_[i], ref)) out += std::to_string(i) + " ";
    }
    return out;
  }

  void step(std::mt19937_64& random) {
    const std::size_t first = random() % keys_.size();
    const std::size_t count = std::min<std::size_t>(1 + random() % 12, keys_.size() - first);
    const auto run = std::span(keys_).subspan(first, count);
    bool wrong = false;
    switch (random() % 8) {
      case 0:
        pool_->maintain();
        return;
      case 1:
        static_cast<void>(store_->demote(index_, run));
        return;
      case 2:
      case 3: {
        const auto ticket = store_->promote(index_, {run.begin(), run.end()});
        if (random() % 4 != 0) static_cast<void>(ticket->wait(std::chrono::seconds(60)));
        for (const Key& key : run) static_cast<void>(right_or_gone(key, wrong));
        break;
      }
      case 4:
        static_cast<void>(store_->demote_round());
        return;
      default:
        for (const Key& key : run) static_cast<void>(put_one(*pool_, index_, key));
    }
    if (wrong) throw std::runtime_error("WRONG bytes");
  }

  std::string work(const Words& w) {
    std::mt19937_64 random(std::stoull(w.at(1)));
    for (std::uint64_t steps = std::stoull(w.at(2)); steps > 0; --steps) step(random);
    return "done";
  }

  std::string check(const Words&) {
    const std::vector<std::string> findings = pool_->check();
    std::string out = std::to_string(findings.size());
    for (const std::string& finding : findings) out += " | " + finding;
    return out;
  }

  std::shared_ptr<FaultyFiles> files_ = std::make_shared<FaultyFiles>(disk::system_files());
  std::shared_ptr<Pool> pool_;
  std::unique_ptr<disk::Store> store_;
  std::uint32_t index_ = 0;
  std::vector<Key> keys_;
};

const std::map<std::string, StoreClient::Command>& StoreClient::commands() {
  static const std::map<std::string, Command> table = {
      {"open", &StoreClient::open},  // POOL_DIR STORE_DIR STORE_BYTES KEYS BACKGROUND(0|1)
      {"die", &StoreClient::die},    // write|read|sync|reserve|any NUMBER
      {"work", &StoreClient::work},  // SEED STEPS
      {"serve", &StoreClient::serve},
      {"on_disk", &StoreClient::on_disk},
      {"check", &StoreClient::check},
      {"clear_pool", [](StoreClient& c, const Words&) { return std::to_string(c.pool_->clear()); }},
      {"recover",
       [](StoreClient& c, const Words&) {
         c.store_->recover();
         return std::string("done");
       }},
      {"maintain",
       [](StoreClient& c, const Words&) {
         c.pool_->maintain();
         return std::string("done");
       }},
  };
  return table;
}

}  // namespace
}  // namespace hpkv::test

int main() {
  hpkv::test::StoreClient client;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream stream(line);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (words.empty()) continue;
    std::printf("%s\n", client.run(words).c_str());
    std::fflush(stdout);
  }
  return 0;
}
