/* Tests of wrong user input: files that are not text, shards of another vocabulary or program,
 * weights in several files. */

/* ----- the table --------------------------------------------------------- */

/* Files of 300 letters that contain some other bytes, what prepare_data calls them, and how its
 * sentence ends: ": give" or a command. A file without a kind is for the rows below. */
static const struct {
  const char *name;
  size_t at, count;
  const char *bytes, *kind, *advice;
} inputs_files[] = {
    {"parquet", 0, 4, "PAR1", "a Parquet file", " for row in batch.to_pylist()]' parquet > "
     "parquet.jsonl &&\n"},
    {"arrow", 0, 6, "ARROW1", "an Arrow file", "lines of JSON:\npython3 -c 'import "},
    {"stream", 0, 4, "\xFF\xFF\xFF\xFF", "an Arrow stream", "lines of JSON:\npython3 -c 'import "},
    {"gz", 0, 2, "\x1F\x8B", "packed by gzip", "\ngzip -dc < gz > gz.txt &&\n"},
    {"zst", 0, 4, "\x28\xB5\x2F\xFD", "packed by zstd", "\nzstd -dc --long=31 zst >"},
    {"xz", 0, 6, "\xFD" "7zXZ\0", "packed by xz", "\nxz -dc xz > xz.txt &&\n"},
    {"d.jsonl.xz", 0, 6, "\xFD" "7zXZ\0", "packed by xz", " d.jsonl.xz > d.jsonl.xz.jsonl"},
    {"bz2", 0, 10, "BZh91AY&SY", "packed by bzip2", "\nbzip2 -dc bz2 >"},
    {"7z", 0, 6, "7z\xBC\xAF\x27\x1C", "a 7-Zip archive", "\n7z x -so 7z >"},
    {"zip", 0, 4, "PK\x03\x04", "a zip archive", "\nunzip -p zip >"},
    {"tar", 257, 5, "ustar", "a tar archive", "\ntar -xOf tar >"},
    {"pdf", 0, 5, "%PDF-", "a PDF", "\npdftotext pdf - >"},
    {"utf16", 0, 2, "\xFF\xFE", "text in UTF-16", "\niconv -f utf-16 -t utf-8 utf16 >"},
    {"utf16be", 0, 2, "\xFE\xFF", "text in UTF-16", "\niconv -f utf-16 -t utf-8 utf16be >"},
    {"le", 0, 8, "a\0b\0c\0d", "binary", ": give a text file\n"},
    {"be", 0, 8, "\0a\0b\0c\0d", "binary", ": give a text file\n"},
    {"latin1", 100, 4, "\xE9\xE8 \xE9", /* the last 3 of 300 may be cut */
     "perhaps in Latin-1 (3 of its first 297 characters are invalid)", "\niconv -f latin1 -t "},
    {"some", 100, 3, "\xE9\xE8z", NULL, NULL}, /* 2 of 297 characters */
    {"elf", 0, 7, "\x7F" "ELF\2\1\1", "a program or a library (ELF)", ": give a text file\n"},
    {"shard.txt", 0, 8, "\x88\xD8\x34\x01\1\0\0\0", "a shard of tokens", ": give a text file\n"},
    {"llama3.bin", 0, 8, "\xA1\xD9\x34\x01\x07\0\0\0", NULL, NULL},
    {"hellaswag.bin", 0, 8, "\x8A\xD8\x34\x01\x01\0\0\0", NULL, NULL},
    {"array.json", 0, 3, "[{\"", "an array of JSON",
     "\njq -c '.[]' array.json > array.json.jsonl &&\n"},
    {"indented.json", 0, 5, "[\n  {", "an array of JSON", "\njq -c '.[]' "},
    {"marked.json", 0, 4, "\xEF\xBB\xBF[", "an array of JSON", "\njq -c '.[]' "},
    {"lines.json", 0, 6, "{\r\n  \"", "JSON with line breaks inside of objects",
     "\njq -c . lines.json > lines.json.jsonl &&\n"},
    {"d.ndjson", 0, 300, NULL, NULL, NULL},
};

/* $P is prepare_data, $T a short training, $N and $A the same with two shards, $X ./train alone, $W
 * with the weights of a run on $A's shard, $R the repository. In the expected sentence "~"
 * stands for any text. */
#define INPUTS_SPLIT(dir, index)                                                               \
  "mkdir " dir "; cp split/*.json split/model-* " dir "; echo '{" index "}' > " \
  dir "/model.safetensors.index.json; $T --seq 4 --train old.bin --init-from " dir
#define INPUTS_EMPTY(name) \
  "\"" name "\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}"
static const struct { const char *command; int code; const char *sentence; } inputs_rows[] = {
    /* newcomers' first mistakes, in the order of the README */
    {"$P \"*.txt\"", 1, "there is no file *.txt: remove the quotes"},
    {"head -c 9000 $R/gpt2_zero.h > n.txt; $P --val-fraction 0.5 n.txt && mv out/n* .", 0, ""},
    {"$X", 1, "nothing to do. To train: --train GLOB"},
    {"CUDA_VISIBLE_DEVICES=none SLURM_JOB_GPUS=0,1 $X --init-from $R/golden/tiny --prompt a", 1,
     "warning: this runs on the CPU: th"}, /* a build without CUDA; or driver and variable */
    /* 8 bits, above the size where they pay */
    {"$X --dry-run --device cuda --fp8 all --batch 2 --seq 512", 0,
     "--fp8 all is not used~2 x 512~from 2048 tokens on"},
    {"$X --dry-run --device cuda --fp8 all --batch 2 --seq 512 | grep -c fp8=", 1, "0"},
    {"$X --dry-run --device cuda --fp8 all --batch 4 --seq 512", 0, ", fp8=all"},
    {"$T --train n.txt", 1, "./prepare_data --vocab data/vocab.bpe --out data --name NAME n.txt\n"},
    {"printf 'h e\\n' > \"v o.bpe\"; $T --val d.ndjson --vocab \"v o.bpe\"", 1,
     "d.ndjson: the name of~./prepare_data --vocab 'v o.bpe' "},
    {"gzip -c n.txt > n.gz; $T --train n.gz", 1,
     "n.gz: the name of token shards ends in .bin. To make shards of text~./prepare_data "},
    {"$T --train \"n.tx?\"", 1, "n.txt: the name of token shards ends in .bin. To make shards of t"},
    {"$N", 1, "n_train_000000.bin~ 257~ 50257 tokens: give --vocab-size 257\n"},
    {"$N --context 5000", 1, "at least 5001 tokens~ 5001: use more data, or lower batch"},
    {"RANK=0 WORLD_SIZE=2 $N", 1, "without MASTER_PORT: set "},
    {"SLURM_NTASKS=4 SLURM_JOB_ID=1 $N --vocab-size 257", 1,
     "SLURM_NTASKS=4~not a task of a step: start 4 ranks with srun or mpirun, or one with srun -n 1"},
    {"$N --vocab-size 257 --run-dir run", 0, "report.html"},
    {"$N --vocab-size 257 --run-dir run", 1,
     "To train its weights further: the same command with --run-dir run-2 --init-from run/weights\n"},
    {"for n in 1 2; do echo text > e$n.txt; done; $X --init-from run/weights --eval "
     "e?.txt n.txt | cut -d ' ' -f 1 | tr '\n' ' '", 0, "e1.txt e2.txt n.txt "},
    {"$X --init-from run/weights --eval \"?.none\"", 1, "?.none~No such file"},
    /* prompts from a file or a pipe: a line each, without a text of the program's */
    {"{ printf 'a b\\r\\n\\n'; yes z | head -c 150000 | tr -d '\\n'; } | $X --init-from run/weights "
     "--prompt - --temperature 0 --sample-tokens 1 > said; grep -c '^a b' said; grep -c zzz said; "
     "! grep '>' said", 0, "1\n1\n"},
    {"printf 'a\\0b\\n' | $X --init-from run/weights --prompt - --sample-tokens 1", 1,
     "line 1 of the prompts has a zero byte"},
    {"$X --init-from run/weights < /dev/null", 1, "--prompt TEXT, --prompt - for each line of"},
    {"$N --vocab-size 257 --sample-tokens 8 --prompt -", 1, "--prompt - reads standard input, which only gen"},
    /* in the shell of `salloc -n 4`: what needs one process starts without srun */
    {"export SLURM_NTASKS=4 SLURM_JOB_ID=1; W=\"$X --init-from run/weights --run-dir none\"; "
     "$W --prompt a --sample-tokens 3 && $W --eval n.txt && $W --val n_val_000000.bin --batch 1 && "
     "$W --dry-run && for n in 1 2; do $N --vocab-size 257 --ranks $n || exit; done", 0,
     "perplexity~val loss~largest B~ranks 1 =~ranks 2 ="},
    {"for n in --prompt --eval; do $X --init-from run/weights $n n.txt --ranks 2 2>&1; done | "
     "grep -c 'there are 2 processes, but one gen.*: start one, .* or with srun -n 1$'", 0, "2\n"},
    {"(ulimit -s 100; $X --help)", 1, "train: the stack~100 KiB, but 128~: type ulimit -s 8192"},
    {"(ulimit -s 100; $P n.txt)", 1, "prepare_data: the stack is limited to 100 KiB"},
    {"(ulimit -Ss 100; $P --out small n.txt)", 0, ""}, /* a limit that can rise is raised */
    {"(ulimit -s 128; $N --vocab-size 257 --save-every 1 --ranks 2 --run-dir small/run)", 0, ""},
    /* top and pgrep find the program and its ranks by name, although they start themselves again */
    {"$N --vocab-size 257 --steps 100000000 --ranks 2 > log & until grep -q loss log; do sleep 0.1; "
     "done; for p in $! $(cat /proc/$!/task/$!/children); do cat /proc/$p/comm; done; kill $!; "
     "wait $!; rm log", 0, "train\ntrain\ntrain\n"},
    /* ranks of a launcher: a message that all would print is printed once per host */
    {"export WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_PORT=29444; for r in 0 1 2; do for flags in "
     "'--bathc 4' '--train none.bin --init-from no/w' '--init-from $R/golden/tiny --prompt x' "
     "'--train n_train_000000.bin --vocab none'; do "
     "RANK=$r LOCAL_RANK=$r $X $flags 2>&1; done; done | grep -c 'train: '", 0, "4\n"},
    /* a rank that alone cannot read a file prints it */
    {"WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_PORT=29444 RANK=1 LOCAL_RANK=1 $N --vocab "
     "/proc/self/mem", 1, "[rank 1] train: cannot read /proc/self/mem: "},
    /* the command must not replace a file that is there */
    {"cp gz there; cp gz there.txt; cp gz there-2.txt; $P there", 1,
     "gzip -dc < there > there-3.txt &&\n"},
    {"$P --strict latin1", 1, "latin1 is perhaps in Latin-1"},
    {"$P --strict xz", 1, "xz is packed by xz"},
    {"$P d.ndjson zip", 1, "zip is a zip archive"}, /* before any output is written */
    {"cat xz | $P -", 1, ":\nxz -dc FILE > FILE.txt &&\n"},
    {"cat latin1 | $P --field text -", 1, " --field text FILE.jsonl\n"},
    {"{ head -c 3 tar; sleep 0.2; tail -c +4 tar; } | $P -", 1, "standard input is a tar "},
    {"gzip -c tar > tar.gz; $P tar.gz", 1, "\ngzip -dc tar.gz | tar -xOf - > tar."},
    /* not text under any name; and the result of the advised command */
    {"head -c 70000 /dev/urandom > random; $P random", 1, "random is binary, not text"},
    {"$P - < /dev/zero", 1, "standard input is binary, not"},
    {"$P --field a - < /dev/zero", 1, "standard input is binary, not"},
    {"yes | tr -d '\\n' | $P --field a -", 1, "standard input, line 1 has no end within 256 MiB"},
    {"mkdir \"a \\$b\"; f=\"a \\$b/it's\"; printf '{\"text\": \"caf\\351s\"}' > "
     "\"$f.jsonl\"; $P --name n --val-fraction 0 \"$f.jsonl\" 2>&1 | tail -n 2 > advice; "
     "bash advice", 0, "train       1 document, 7 tokens"},
    {"rm out/n_*; for e in utf-16le utf-16be utf-32; do echo 'text of letters' | iconv -f utf-8 "
     "-t $e > wide; $P --name $e --val-fraction 0 wide 2>&1 | tail -n 2 > advice; bash "
     "advice; rm out/$e* wide.txt; done", 0, "17 tokens"},
    {"yes 'plain words and numbers 12345' | head -c 200000 > u; for at in 5 77 1234 60000; do "
     "printf '\\377\\200\\303(' | dd of=u bs=1 seek=$at conv=notrunc 2> /dev/null; done; "
     "$P --name u --val-fraction 0 u && rm out/u_*", 0, "train       1 document, 2000"},
    {"ls out", 0, ""},
    {"rmdir out", 0, ""},
    {"$P some", 0, "train  "}, /* up to 1 % is replaced */
    {"$P d.ndjson", 0, "val         1 document, 4 tokens"},
    {"cp d.ndjson old.json; printf '{\\n  \"text\": \"a\"\\n}\\n' > pretty.json", 0, ""},
    {"$P --name o old.json", 0, "val         1 document, 4 tokens"},
    {"$P --name p pretty.json", 1, "JSON with line breaks inside of objects~jq -c . pretty.json > "},
    {"$P --field body some", 1, "its name does not end in .jsonl, .ndjson or .json: rename it"},
    /* shards of another vocabulary */
    {"head -c 60000 $R/gpt2_zero.h > a.txt; $P --train-bpe 300 a.txt && mv out/a* .", 0, ""},
    {"tail -c 60000 $R/gpt2_zero.h > b.txt; $P --train-bpe 300 b.txt && mv out/b* .", 0, ""},
    {"for n in a b; do for s in train val; do mv ${n}_${s}_000000.bin $n-$s.bin; done; "
     "done; { head -c 12 a-train.bin; head -c 1012 /dev/zero; tail -c +1025 a-train.bin; } > "
     "old.bin", 0, ""},
    {"$A --val a-val.bin --vocab a.bpe", 0, ""},
    {"$A --vocab b.bpe", 1, "a-train.bin~ than b.bpe: give the shards' own with --vocab FILE"},
    {"$T --val a-val.bin --vocab b.bpe", 1, "a-val.bin was made with another vocabulary"},
    {"$A --val b-val.bin --vocab a.bpe", 1, "b-val.bin~ vocabulary than a.bpe: give"},
    {"$A --val b-val.bin --vocab-size 300", 1, "b-val.bin~ than a-train.bin: give"},
    /* no target in rank 0's part of the validation; some in rank 1's */
    {"printf '{\"p\": \"abcdefg\", \"c\": \"xyxyxyxyxy\"}\\n' > m.json; $P --field p,c --name m "
     "--val-fraction 0 m.json && mv out/m_* . && $T --vocab-size 257 --val m_train_000000.bin "
     "--val-steps 1", 1, "no token of the first 1 validation batch counts: raise --val-steps or "},
    {"$T --vocab-size 257 --val m_train_000000.bin --val-steps 1 --ranks 2", 0, "val loss"},
    {"cp a-train.bin tokens; $T --train tokens --vocab a.bpe", 1,
     "ends in .bin. Rename it: mv tokens tokens.bin\n"},
    {"$T --train tokens:2 --vocab a.bpe", 1, "mv tokens tokens.bin\n"},
    {"$T --val \"toke*\" --vocab a.bpe", 1, "mv tokens tokens.bin\n"},
    {"$T --train \"a*n:2\" --vocab a.bpe; cp tokens a-n; $T --train \"a*n:2\" --vocab a.bpe", 1,
     "a*n:2 also matches a-n, which~narrow the pattern to 'a*.bin'"},
    {"mv tokens t.bin.1; $T --train t.bin.1 --vocab a.bpe", 1, "mv t.bin.1 t.bin.1.bin\n"},
    {"$A --vocab-size 257", 1, "a-train.bin~ than the vocabulary of 256 bytes: give"},
    {"$T --train \"?-train.bin\" --vocab a.bpe", 1, "a-train.bin and b-train.bin~: narrow"},
    {"$T --train old.bin --val a-val.bin --vocab a.bpe", 0, ""}, /* names no vocabulary */
    {"$T --train old.bin --vocab b.bpe", 0, ""},
    {"$P --vocab a.bpe --format raw b.txt && $T --train out/train.bin --vocab b.bpe", 0, ""},
    {"$P a.txt && $T --train out/a_train_000000.bin --vocab-size 257", 0, ""},
    /* saved models, and another vocabulary of the same size */
    {"$A --vocab-size 300 --run-dir va --save-every 1", 0, ""},
    {"$T --train b-train.bin --vocab-size 300 --run-dir va --resume latest --steps 2", 1,
     "va/step-000001 has another vocabulary (hash "},
    {"$A --vocab-size 300 --run-dir va --resume latest --steps 2", 0, ""},
    {"$W --vocab b.bpe --prompt a", 1, "b.bpe is not~va/weights: give their own"},
    {"$W --vocab b.bpe --eval b.txt", 1, "the weights in va/weights: give their own"},
    {"$W --vocab a.bpe --eval a.txt", 0, "perplexity"},
    {"$W --eval b-val.bin", 1, "b-val.bin~ than the model's: prepare it again"},
    {"$W --eval a-val.bin", 0, "perplexity"},
    {"$W --batch 1 --steps 1 --train b-train.bin", 1,
     " than va/weights: give~./prepare_data --vocab FILE\n"},
    {"cp b.bpe va/weights/merges.txt; $W --prompt a", 1, "merges.txt is not the vocabulary"},
    {"cp a.bpe va/weights/merges.txt; sed -i /vocab_hash/d va/weights/config.json; "
     "$W --vocab b.bpe --prompt a", 1, "va/weights: give their own, or remove --vocab"},
    /* the same shards in training and validation */
    {"$T --train \"a-*.bin\" --val a-val.bin --vocab a.bpe", 1,
     "a-val.bin is both a training and a validation shard: \"a-*.bin\" and \"a-val.bin\" match"},
    {"$T --train \"?-*.bin\" --vocab a.bpe", 1, "were made with different vocabularies"},
    {"for s in train val; do ln a-$s.bin train_${s}_0.bin; done; " /* --name train */
     "$T --train \"train_*.bin\" --vocab a.bpe", 0, ""}, /* a name is a name */
    {"$T --train a-val.bin --vocab a.bpe", 0, ""}, /* given by its exact name, it is used */
    {"$A --train b-train.bin --vocab a.bpe", 1,
     "\"a-train.bin\" has no weight~: type --train 'a-train.bin:0.5'"},
    {"$T --val a-train.bin --val b-train.bin --vocab a.bpe", 1, "--val is given twice~b-train.bin"},
    {"$A --train a-train.bin --vocab a.bpe", 0, ""},
    {"ln -s a-val.bin l.bin; $T --train l.bin --val a-val.bin --vocab a.bpe", 1, "l.bin is both"},
    {"$T --train none.bin --val none.bin", 1, "no file has the name or pattern \""},
    /* default directories of runs that begin in the same second */
    {"for i in 1 2 3; do $X --device cpu --train a-train.bin --vocab a.bpe "
     "--layers 1 --channels 16 --heads 2 --context 16 --batch 1 --steps 1 || break; done > log; "
     "ls -d runs/*/w* | wc -l", 0, "3\n"},
    /* llm.c's other files */
    {"$T --train llama3.bin", 1, "uint32 tokens of Llama 3, not a token shard of GPT-2"},
    {"$A --val hellaswag.bin --vocab a.bpe", 1,
     "hellaswag.bin is an evaluation file~ --eval reads"},
    {"{ printf '\\306\\327\\064\\001'; head -c 4000 /dev/zero; } > llmc.bin; $T --train "
     "llmc.bin --vocab a.bpe", 1, "llmc.bin is a model of llm.c"},
    {"echo 'version https://git-lfs.github.com/spec/v1' > lfs.json; $A --vocab lfs.json", 1,
     "lfs.json is a pointer of git-lfs"},
    /* weights in several files */
    {"$T --seq 4 --train a-train.bin --init-from split", 0, "2 layers"},
    {INPUTS_SPLIT("no_map", ""), 1, "index.json has no weight_map"},
    {INPUTS_SPLIT("gone", "\"weight_map\": {\"a\": \"none.safetensors\"}"), 1,
     "gone/none.safetensors: No such file"},
    {INPUTS_SPLIT("half", "\"weight_map\": {\"a\": \"model-0.safetensors\"}"), 1,
     "index.json has no tensor \"transformer.ln_f.weight\""},
    {INPUTS_SPLIT("twice", "\"weight_map\": {\"a\": \"model-0.safetensors\", \"b\": "
                           "\"./model-0.safetensors\"}"), 1,
     "index.json names tensor \"transformer.h.0"},
    {"printf '\\153\\0\\0\\0\\0\\0\\0\\0%s' '{" INPUTS_EMPTY("a") "," INPUTS_EMPTY("a") "}' > "
     "same; " INPUTS_SPLIT("same_file", "\"weight_map\": {\"a\": \"../same\"}"), 1,
     "/same names tensor \"a\" twice"},
    {INPUTS_SPLIT("self", "\"weight_map\": {\"a\": \"model.safetensors.index.json\"}"), 1,
     "not a safetensors file"},
    {INPUTS_SPLIT("number", "\"weight_map\": {\"a\": 3}"), 1, "column 22: "},
    /* requirements of `make` */
    {"mkdir bin; ln -s /bin/echo /bin/mkdir /bin/sh bin; M=$(command -v make); cp "
     "$R/Makefile .; env -u MAKEFLAGS PATH=$PWD/bin $M NVCC= data/vocab.bpe", 2,
     "neither curl nor wget~apt-get install curl"},
};

/* Writes DIRECTORY/split: two files, which take the tensors alternately, and an index. */
static void test_inputs_weights(g2z_test *t) {
  static float values[9001 * 8];
  const g2z_train_config config = test_weights_model();
  g2z__safetensor tensors[4 + 2 * 12];
  FILE *index;
  CHECK_OK(t, test_weights_save(t, &config, test_path(t, "split"), -1, 0));
  g2z__safetensors *whole = test_safetensors(t, test_path(t, "split/model.safetensors"));
  for (size_t part = 0; part < 2; part++) {
    g2z_writer *writer;
    size_t some = 0;
    for (size_t i = part; i < whole->count; i += 2) tensors[some++] = whole->tensors[i];
    CHECK_OK(t, g2z__safetensors_create(&t->services, test_at(t, "split/model-%zu.safetensors",
                                                             part), tensors, some, &writer));
    for (size_t i = part; i < whole->count; i += 2) {
      CHECK_OK(t, g2z__safetensors_read(whole, (int)i, 0, whole->tensors[i].elements, values));
      CHECK_OK(t, g2z_writer_put(writer, values, whole->tensors[i].elements * 4));
    }
    CHECK_OK(t, g2z_writer_commit(writer));
    g2z_writer_free(writer);
  }
  index = fopen(test_path(t, "split/model.safetensors.index.json"), "w");
  for (size_t i = 0; i < whole->count && index; i++)
    fprintf(index, "%s\"%s\": \"model-%zu.safetensors\"",
            i ? ", " : "{\"metadata\": {\"total_size\": 9}, \"weight_map\": {",
            whole->tensors[i].name, i % 2);
  CHECK(t, index && fputs("}}\n", index) >= 0 && fclose(index) == 0);
  CHECK(t, unlink(test_path(t, "split/model.safetensors")) == 0);
}

/* Runs a row in a shell, in the test's directory. */
static void test_inputs_row(g2z_test *t, const char *command, int code, const char *sentence) {
  char line[4096], output[16384], want[1024];
  const int learns = strstr(command, "$P --vocab") || strstr(command, "--train-bpe");
  snprintf(line, sizeof line, "{ R=$PWD; P=\"$(realpath %s) --out out%s\"; X=$(realpath %s); "
           "T=\"$X --device cpu --layers %s --heads 1 --channels 8 --context 5 --batch 1 --steps 1 "
           "--sample-tokens 0 --dtype fp32 --run-dir none\"; N=\"$T --train n_train_000000.bin\"; "
           "A=\"$T --train a-train.bin\"; W=\"$X --device cpu --init-from va/weights\"; cd '%s'; "
           "%s; } 2>&1", test_prepare_program(), learns ? "" : " --bytes", test_train_program(),
           strstr(command, "--init-from") ? "2" : "1", t->directory, command);
  const int got = test_shell(line, output, sizeof output);
  const char *at = output;
  snprintf(want, sizeof want, "%s", sentence);
  for (char *part = strtok(want, "~"); part && at; part = strtok(NULL, "~")) at = strstr(at, part);
  FAIL_IF(t, got != code || !at, "%s: exit code %d: %s\n    expected %d: %s", command, got, output,
          code, sentence);
}

static void test_inputs_rows(g2z_test *t) {
  static const char documents[] = "{\"text\": \"abc\"}\n{\"text\": \"def\"}\n";
  char letters[300];
  if (!test_train_is_there() || access(test_prepare_program(), X_OK) != 0)
    SKIP(t, "./train or ./prepare_data is not built: make");
  test_inputs_weights(t);
  for (size_t i = 0; i < sizeof inputs_files / sizeof *inputs_files; i++) {
    const char *name = inputs_files[i].name, *kind = inputs_files[i].kind;
    memset(letters, 'x', sizeof letters);
    if (inputs_files[i].bytes)
      memcpy(letters + inputs_files[i].at, inputs_files[i].bytes, inputs_files[i].count);
    test_write_file(t, test_path(t, name), letters, sizeof letters);
    if (!kind) continue;
    const char *command = test_text("$P %s", name);
    test_inputs_row(t, command, 1, test_text("%s is %s, not text in UTF-8", name, kind));
    test_inputs_row(t, command, 1, inputs_files[i].advice);
  }
  test_write_file(t, test_path(t, "d.ndjson"), documents, sizeof documents - 1);
  for (size_t i = 0; i < sizeof inputs_rows / sizeof *inputs_rows; i++)
    test_inputs_row(t, inputs_rows[i].command, inputs_rows[i].code, inputs_rows[i].sentence);
}

/* ----- weights in several files ------------------------------------------ */

static g2z_status test_weights_open(g2z_context *context, const char *directory) {
  g2z_model *model;
  g2z_status status = g2z_model_open(context, directory, G2Z_FP32, &model);
  g2z_model_free(model);
  return status;
}

static void test_weights_split(g2z_test *t) {
  const g2z_train_config config = test_weights_model();
  const char *directory = test_at(t, "split");
  g2z_context *context;
  test_inputs_weights(t);
  test_weights_equal(t, &config, directory);
  REQUIRE_OK(t, test_context(t, G2Z_DEVICE_CPU, &context));
  CHECK_NO_MEMORY(t, 8, 200, test_weights_open(context, directory), 1);
}

/* ----- the hash of a vocabulary ------------------------------------------ */

/* Its place in a shard, the loaders that find it, and its independence of the file's format. */
static void test_vocab_hash(g2z_test *t) {
  static const uint64_t hashes[] = {0, 0x123456789abcdef0u};
  static const char merges[] = "#version: 0.2\nt h\nth e\n", other[] = "#version: 0.2\nt h\nh e\n";
  int32_t ids[100];
  g2z_tokenizer *tokenizer, *again;
  memset(ids, 0, sizeof ids);
  for (int i = 0; i < 2; i++) {
    const char *path = test_path(t, "a.bin");
    CHECK_OK(t, test_shard_write(t, path, G2Z_SHARD_LLMC, hashes[i], ids, 100));
    CHECK(t, memcmp(test_read(t, "a.bin") + 12, &hashes[i], 8) == 0);
    g2z_loader_config config = test_loader_config(path, 2, 8);
    const g2z_loader *loader = test_loader(t, &config);
    CHECK(t, loader->vocab_hash == hashes[i] && (loader->vocab_shard != NULL) == i);
  }
  CHECK(t, g2z_tokenizer_hash(test_tokenizer(t, NULL)) == 0xcbf29ce484222325u);
  CHECK_OK(t, g2z_tokenizer_parse(&t->services, "m", merges, sizeof merges - 1, &tokenizer));
  CHECK_OK(t, g2z_tokenizer_parse(&t->services, "m", other, sizeof other - 1, &again));
  CHECK(t, g2z_tokenizer_hash(tokenizer) != g2z_tokenizer_hash(again));
  g2z_tokenizer_free(again);
  CHECK_OK(t, g2z_tokenizer_write_merges(&t->services, tokenizer, test_path(t, "again")));
  again = test_tokenizer(t, test_path(t, "again"));
  CHECK(t, g2z_tokenizer_hash(tokenizer) == g2z_tokenizer_hash(again));
  g2z_tokenizer_free(tokenizer);
  /* A trainer takes it from weights or from a checkpoint, and lends it with its model. */
  g2z_train_config config = test_config_of(1, 2, 16, 8, 61);
  for (int i = 0; i < 3; i++) {
    config.model.vocab_hash = i ? 0 : hashes[1];
    config.init_from = i == 1 ? test_at(t, "weights") : NULL;
    g2z_trainer *trainer = test_trainer_of(t, &config);
    if (i == 0) CHECK_OK(t, g2z_trainer_save_weights(trainer, test_at(t, "weights")));
    if (i == 0) CHECK_OK(t, g2z_trainer_save(trainer, test_at(t, "saved")));
    if (i == 2) CHECK_OK(t, g2z_trainer_load(trainer, test_at(t, "saved")));
    CHECK(t, trainer->model.config.vocab_hash == hashes[1]);
  }
}
