/* A C host: opens a local cache, puts, gets, misuses, closes. Exits with the line of the first failure. */
#include "hotslice.h"
#include <stdio.h>
#include <string.h>

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, hotslice_last_error());    \
      return 1;                                                                               \
    }                                                                                         \
  } while (0)

int main(void) {
  HotsliceCache *cache = NULL;
  const uint8_t key[] = "prefix/0", value[] = "bytes of one slice";
  uint8_t buffer[64] = {0};
  uint64_t length = 0;
  char text[4096];

  CHECK(hotslice_abi_version() == HOTSLICE_ABI_VERSION);
  CHECK(hotslice_open(1, NULL, &cache) == HOTSLICE_STATUS_INVALID_ARGUMENT);
  CHECK(strstr(hotslice_last_error(), "capacity_bytes") != NULL);
  CHECK(hotslice_open(64u << 20, NULL, NULL) == HOTSLICE_STATUS_INVALID_ARGUMENT);
  CHECK(hotslice_open(64u << 20, "no port", &cache) == HOTSLICE_STATUS_INVALID_ARGUMENT);
  CHECK(cache == NULL);
  CHECK(hotslice_open(64u << 20, NULL, &cache) == HOTSLICE_STATUS_OK);

  CHECK(hotslice_get_into(cache, key, 8, buffer, 64, &length, 1000) == HOTSLICE_STATUS_ABSENT);
  CHECK(hotslice_put(cache, key, 8, value, 18, 1000) == HOTSLICE_STATUS_OK);
  CHECK(hotslice_get_into(cache, key, 8, buffer, 64, &length, 1000) == HOTSLICE_STATUS_OK);
  CHECK(length == 18 && memcmp(buffer, value, 18) == 0);
  length = 0;
  CHECK(hotslice_get_into(cache, key, 8, buffer, 17, &length, 1000) == HOTSLICE_STATUS_BUFFER_TOO_SMALL);
  CHECK(length == 18);
  CHECK(hotslice_get_into(cache, NULL, 8, buffer, 64, &length, 1000) == HOTSLICE_STATUS_INVALID_ARGUMENT);
  CHECK(hotslice_get_into(cache, key, 0, buffer, 64, &length, 1000) == HOTSLICE_STATUS_INVALID_ARGUMENT);
  CHECK(hotslice_get_into(NULL, key, 8, buffer, 64, &length, 1000) == HOTSLICE_STATUS_INVALID_ARGUMENT);
  CHECK(hotslice_get_into(cache, key, 8, NULL, 64, &length, 1000) == HOTSLICE_STATUS_INVALID_ARGUMENT);
  CHECK(hotslice_stats_json(cache, text, sizeof text) == HOTSLICE_STATUS_OK);
  CHECK(strstr(text, "\"puts\":1") != NULL);
  CHECK(hotslice_stats_json(cache, text, 4) == HOTSLICE_STATUS_BUFFER_TOO_SMALL);
  CHECK(hotslice_invalidate(cache, key, 8, 1000) == HOTSLICE_STATUS_OK);
  CHECK(hotslice_get_into(cache, key, 8, buffer, 64, &length, 1000) == HOTSLICE_STATUS_ABSENT);
  hotslice_close(cache);
  hotslice_close(NULL);
  return 0;
}
