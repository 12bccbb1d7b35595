/* Draws a chart from a file of figures: draw FILE.txt writes FILE-light.svg and FILE-dark.svg. MIT
 * licence.
 *
 * A line of the file is a word and its text. Values stand between bars. A # begins a comment line.
 *     title TEXT                       about TEXT: a line below the title
 *     x TEXT                           the name of the x axis
 *     series NAME | NAME | ...         of a bar chart; then for each group of bars
 *     bar LABEL | VALUE | VALUE ...
 *     line NAME | X Y | X Y ...        a curve, in place of bars
 * A program in the list below has the same colour in all pictures. */

#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include "extras/g2z_report.h"

#define POINTS 256 /* most groups of bars, or points of a curve */
#define TEXT 4096  /* most bytes of a line */

/* The colour of a series is the one of its place in the chart. Other names take free places. */
static const struct {
  const char *program;
  int place;
} places[] = {{"llm.c", 2}, {"PyTorch", 3}};

/* The place of a series whose name begins with a program, or the next free one. */
static int place_of(const char *name, int *free) {
  for (size_t i = 0; i < G2Z_COUNT(places); i++)
    if (strncmp(name, places[i].program, strlen(places[i].program)) == 0) return places[i].place;
  for (size_t i = 0; i < G2Z_COUNT(places); i++) *free += *free == places[i].place;
  return (*free)++;
}

/* Cuts off the part of *text before the next bar, without its blanks. NULL: there is none. */
static char *next_part(char **text) {
  char *part = *text, *end;
  if (!part) return NULL;
  *text = strchr(part, '|');
  if (*text) *(*text)++ = 0;
  part += strspn(part, " ");
  for (end = part + strlen(part); end > part && strchr(" \n", end[-1]);) *--end = 0;
  return part;
}

static g2z_status draw(g2z_services *services, const char *path) {
  static char lines[G2Z_CHART_SERIES + POINTS][TEXT];
  static double x[G2Z_CHART_SERIES][POINTS], y[G2Z_CHART_SERIES][POINTS];
  static const char *labels[POINTS];
  g2z_series series[G2Z_CHART_SERIES];
  g2z_chart chart;
  size_t groups = 0, kept = 0;
  int place[G2Z_CHART_SERIES], named = 0, free = 0; /* place[i]: of the i-th name in the file */
  memset(series, 0, sizeof series);
  memset(&chart, 0, sizeof chart);
  FILE *file = fopen(path, "r");
  if (!file) return g2z_fail_file(services, errno, "open", path);
  for (int number = 1; kept < G2Z_COUNT(lines) && fgets(lines[kept], TEXT, file); number++) {
    char word[16] = "", *rest = lines[kept], *part;
    int used = 0;
    if (*rest == '#' || sscanf(rest, "%15s %n", word, &used) != 1) continue;
    rest += used;
    char *first = next_part(&rest);
    int bad = 0;
    kept++;                          /* the chart points into this line */
    if (strcmp(word, "title") == 0) chart.title = first;
    else if (strcmp(word, "about") == 0) chart.about = first;
    else if (strcmp(word, "x") == 0) chart.x_name = first;
    else if (strcmp(word, "series") == 0) {
      for (part = first; part && free < G2Z_CHART_SERIES; part = next_part(&rest)) {
        const int s = place[named++] = place_of(part, &free);
        series[s].name = part;
        series[s].y = y[s];
        if (s >= chart.series_count) chart.series_count = s + 1;
      }
    } else if (strcmp(word, "bar") == 0 && groups < POINTS) {
      labels[groups] = first;
      chart.labels = labels;
      for (int i = 0; i < named; i++) {
        part = next_part(&rest);
        bad |= !part || sscanf(part, "%lf", &y[place[i]][groups]) != 1;
        series[place[i]].count = groups + 1;
      }
      groups++;
    } else if (strcmp(word, "line") == 0 && free < G2Z_CHART_SERIES) {
      const int s = place_of(first, &free);
      g2z_series *line = &series[s];
      if (s >= chart.series_count) chart.series_count = s + 1;
      line->name = first;
      line->x = x[s];
      line->y = y[s];
      line->mark = G2Z_MARK_POINTS;
      for (; line->count < POINTS && (part = next_part(&rest)) != NULL; line->count++)
        bad |= sscanf(part, "%lf %lf", &x[s][line->count], &y[s][line->count]) != 2;
    } else {
      bad = 1;
    }
    if (!bad) continue;
    fclose(file);
    return g2z_fail(services, G2Z_FORMAT, "%.400s, line %d is not a line of a chart: see the top "
                    "of draw.c", path, number);
  }
  fclose(file);
  chart.series = series;
  chart.x_axis = G2Z_AXIS_ZERO;
  if (!chart.title || !chart.series_count)
    return g2z_fail(services, G2Z_FORMAT, "%.400s has no title, or no bar and no line", path);
  for (int dark = 0; dark < 2; dark++) {
    char out[4200];
    const size_t stem = strlen(path) - (strlen(path) > 4 ? 4 : 0);
    snprintf(out, sizeof out, "%.*s-%s.svg", (int)stem, path, dark ? "dark" : "light");
    G2Z_TRY(g2z_chart_write(services, out, dark, &chart));
  }
  return G2Z_OK;
}

int main(int argc, char **argv) {
  static g2z_services services;
  for (int i = 1; i < argc; i++) {
    if (draw(&services, argv[i]) == G2Z_OK) continue;
    fprintf(stderr, "draw: %s\n", services.error);
    return 1;
  }
  return 0;
}
