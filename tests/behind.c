/* Includes gpt2_zero.h after every header of C and POSIX. `make check-header` compiles and runs
 * this file in every compiler mode that exposes POSIX. */

#include <assert.h>
#include <complex.h>
#include <ctype.h>
#include <errno.h>
#include <fenv.h>
#include <float.h>
#include <inttypes.h>
#include <iso646.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>
#include <time.h>
#include <wchar.h>
#include <wctype.h>
#ifndef __cplusplus
#include <stdalign.h>
#include <stdatomic.h>
#include <stdnoreturn.h>
#include <threads.h>
#endif

#include <aio.h>
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <ftw.h>
#include <glob.h>
#include <grp.h>
#include <iconv.h>
#include <langinfo.h>
#include <libgen.h>
#include <monetary.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nl_types.h>
#include <poll.h>
#include <pthread.h>
#include <pwd.h>
#include <regex.h>
#include <sched.h>
#include <search.h>
#include <semaphore.h>
#include <spawn.h>
#include <strings.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/times.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <syslog.h>
#include <termios.h>
#include <unistd.h>
#include <utime.h>
#include <wordexp.h>

#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include "extras/g2z_command.h"
#include "extras/g2z_report.h"
#include "extras/g2z_run.h"
#include "extras/g2z_text.h"

/* An undeclared function would return an int, and a pointer would lose its upper half. */
int main(void) {
  static const char text[] = "<|endoftext|><a <|endoftext|><|endoftext";
  static g2z_services services;
  static g2z_tokens tokens;
  g2z_bpe_trainer *trainer = NULL;
  g2z_tokenizer *tokenizer = NULL;
  g2z_encoder *encoder = NULL;
  g2z_status status = g2z_bpe_trainer_create(&services, &trainer);
  if (status == G2Z_OK) status = g2z_bpe_trainer_finish(trainer, 257, &tokenizer);
  if (status == G2Z_OK) status = g2z_encoder_create(&services, tokenizer, &encoder);
  if (status == G2Z_OK)
    status = g2z_encode(encoder, text, sizeof text - 1, G2Z_ENCODE_ALLOW_SPECIAL, &tokens);
  int right = status == G2Z_OK && tokens.count == 1 + 3 + 1 + 11 && tokens.ids[0] == 256 &&
              tokens.ids[1] == '<' - '!' && tokens.ids[4] == 256 && tokens.ids[5] == '<' - '!';
  if (!right) printf("tests/behind.c: %s, %d tokens\n", services.error, (int)tokens.count);
  g2z_tokens_free(&tokens);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(tokenizer);
  g2z_bpe_trainer_free(trainer);
  return !right;
}
