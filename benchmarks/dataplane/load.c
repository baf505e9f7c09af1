/* A load generator that costs next to nothing and checks every answer: one thread, epoll.
 *
 *   load --port P --stream 0|1 --connections C --rate R --count N [--chunks K] [--body-bytes B]
 *        [--hold-s 30] [--seed S] [--distinct 0|1]
 *
 * Every request has the same prompt; with --distinct 1 each begins with a number of its own, so that
 * what looks for shared prefixes finds none.
 *
 * It opens C connections, sends one two-chunk stream over each as a warm-up (so that a proxy's
 * own connections to the instances exist), prints "ready", waits for a line on standard input,
 * then starts N requests: exponential gaps of mean 1/R seconds, each over the connection that has
 * been free the longest, waiting for one where all are busy. When all have ended it prints one
 * JSON object. A stream counts as right when its status is 200, the text of all K deltas came
 * (16 tildes in each; some proxies merge deltas) and its body ends with [DONE]; another answer when its status is 200 and its body has a usage and
 * ends with "}". A connection that ends after a right answer is opened again and counted.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MARKS 16 /* as in mock.c */

enum framing { HEAD, SIZED, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, UNTIL_CLOSE };

struct conn {
    int fd;
    int busy;
    enum framing framing;
    char head[8192];
    size_t head_len;
    int status, closes;
    size_t left;          /* of a sized body, or of the chunk at hand */
    size_t size_digits;
    uint64_t start_ns, first_ns;
    long marks;           /* tildes */
    long events;          /* "data:" at the start of a line */
    int matched;          /* how much of "data:" matches so far; -1 until the next line */
    int saw_usage, usage_at;
    char tail[16];        /* the body's last bytes that are not white space */
    size_t tail_len;
};

static int port, connections = 1, streamed, chunks = 200, body_bytes = 1024, distinct;
static long count = 1, started, finished, errors, reconnects, late, total_events;
static long long total_bytes;
static double rate = 100, hold_s = 30;
static uint64_t *latency, *first;
static long recorded;
static struct conn *conns, **free_ring;
static int free_head, free_count, epoll_fd, measuring;
static char *request, *request_text, *warm_request;
static size_t request_len, warm_len;
static char first_error[256];

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static char *make_request(int stream, int max_tokens, size_t *len)
{
    char *body = calloc(1, (size_t)body_bytes + 512), *text = calloc(1, (size_t)body_bytes + 1);
    const char *format = "{\"model\":\"bench\",\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],"
                         "\"max_tokens\":%d%s}";
    const char *more = stream ? ",\"stream\":true,\"stream_options\":{\"include_usage\":true}" : "";
    int bare = snprintf(body, 512, format, "", max_tokens, more);
    for (int i = 0; i < body_bytes - bare; i++)
        text[i] = i % 6 == 5 ? ' ' : (char)('a' + i % 23);
    snprintf(body, (size_t)body_bytes + 512, format, text, max_tokens, more);
    char *whole = calloc(1, strlen(body) + 512);
    *len = (size_t)sprintf(whole,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: application/json\r\n"
        "Authorization: Bearer sk-bench\r\nUser-Agent: OpenAI/Python 1.99.0\r\n"
        "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s", port, strlen(body), body);
    free(body);
    free(text);
    return whole;
}

static void release(struct conn *c)
{
    c->busy = 0;
    free_ring[(free_head + free_count++) % connections] = c;
}

static void open_connection(struct conn *c)
{
    int one = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(c->fd, (struct sockaddr *)&a, sizeof a) < 0) {
        fprintf(stderr, "load: cannot connect to port %d: %s\n", port, strerror(errno));
        exit(1);
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e);
}

static void reopen(struct conn *c)
{
    close(c->fd);
    open_connection(c);
}

static void start(struct conn *c)
{
    const char *data = measuring ? request : warm_request;
    size_t len = measuring ? request_len : warm_len;
    if (distinct && measuring) {
        char number[17];
        snprintf(number, sizeof number, "%08lx%08lx", mrand48() & 0xffffffffL, mrand48() & 0xffffffffL);
        memcpy(request_text, number, 16);
    }
    c->busy = 1;
    c->framing = HEAD;
    c->head_len = 0;
    c->marks = c->events = c->matched = c->saw_usage = c->usage_at = c->closes = c->status = 0;
    c->tail_len = 0;
    c->first_ns = 0;
    c->start_ns = now_ns();
    if (send(c->fd, data, len, MSG_NOSIGNAL) != (ssize_t)len) {
        reopen(c); /* the proxy had closed an idle connection */
        reconnects++;
        if (send(c->fd, data, len, MSG_NOSIGNAL) != (ssize_t)len) {
            perror("load: cannot send");
            exit(1);
        }
    }
    started++;
}

static void fail(struct conn *c, const char *why)
{
    errors++;
    if (!first_error[0])
        snprintf(first_error, sizeof first_error, "%s (status %d, %ld events, %ld marks)", why,
                 c->status, c->events, c->marks);
}

static void ended(struct conn *c)
{
    uint64_t now = now_ns();
    int stream = measuring ? streamed : 1;
    finished++;
    if (c->status != 200)
        fail(c, "another status than 200");
    else if (stream && c->marks != (measuring ? chunks : 2) * MARKS)
        fail(c, "not the text that was sent");
    else if (stream && (c->tail_len < 6 || memcmp(c->tail + c->tail_len - 6, "[DONE]", 6)))
        fail(c, "no [DONE] at the end");
    else if (!stream && (!c->saw_usage || !c->tail_len || c->tail[c->tail_len - 1] != '}'))
        fail(c, "no usage in the answer");
    if (measuring && recorded < count) {
        total_events += c->events;
        latency[recorded] = now - c->start_ns;
        first[recorded++] = (c->first_ns ? c->first_ns : now) - c->start_ns;
    }
    if (c->closes) {
        reopen(c);
        reconnects++;
    }
    release(c);
}

static void body_bytes_seen(struct conn *c, const char *data, size_t len)
{
    static const char word[] = "data:", usage[] = "completion_tokens";
    if (!c->first_ns)
        c->first_ns = now_ns();
    total_bytes += (long long)len;
    if (streamed || !measuring) {
        for (size_t i = 0; i < len; i++)
            c->marks += data[i] == '~';
        for (const char *at = data, *stop = data + len; at < stop;) {
            if (c->matched < 0) { /* in the middle of a line */
                at = memchr(at, '\n', (size_t)(stop - at));
                if (!at)
                    break;
                at++;
                c->matched = 0;
            } else if (*at == word[c->matched]) {
                at++;
                if (word[++c->matched] == 0) {
                    c->events++;
                    c->matched = -1;
                }
            } else {
                c->matched = *at == '\n' ? 0 : -1;
                at++;
            }
        }
    } else if (!c->saw_usage) {
        for (size_t i = 0; i < len && !c->saw_usage; i++) {
            c->usage_at = data[i] == usage[c->usage_at] ? c->usage_at + 1 : data[i] == usage[0];
            c->saw_usage = usage[c->usage_at] == 0;
        }
    }
    size_t take = len < 16 ? len : 16; /* enough: the end and at most a few line breaks after it */
    for (const char *at = data + len - take; at < data + len; at++) {
        if (*at == '\n' || *at == '\r' || *at == ' ')
            continue;
        if (c->tail_len == sizeof c->tail)
            memmove(c->tail, c->tail + 1, --c->tail_len);
        c->tail[c->tail_len++] = *at;
    }
}

static void parse_head(struct conn *c)
{
    c->status = atoi(c->head + 9);
    c->framing = UNTIL_CLOSE;
    for (char *line = c->head; (line = strchr(line, '\n')); ) {
        line++;
        if (!strncasecmp(line, "content-length:", 15)) {
            c->framing = SIZED;
            c->left = strtoul(line + 15, NULL, 10);
        } else if (!strncasecmp(line, "transfer-encoding:", 18)) {
            c->framing = CHUNK_SIZE;
            c->left = c->size_digits = 0;
        } else if (!strncasecmp(line, "connection: close", 17)) {
            c->closes = 1;
        }
    }
}

/* One step of the parser; returns how many bytes it took and sets *done at the answer's end. */
static size_t parse_step(struct conn *c, const char *data, size_t len, int *done)
{
    size_t n = len;
    switch (c->framing) {
    case HEAD:
        if (c->head_len + 2 > sizeof c->head) {
            fprintf(stderr, "load: a response head of more than %zu bytes\n", sizeof c->head);
            exit(1);
        }
        c->head[c->head_len++] = *data;
        c->head[c->head_len] = 0;
        if (c->head_len >= 4 && !memcmp(c->head + c->head_len - 4, "\r\n\r\n", 4)) {
            parse_head(c);
            *done = c->framing == SIZED && c->left == 0;
        }
        return 1;
    case SIZED:
    case CHUNK_DATA:
        if (n > c->left)
            n = c->left;
        body_bytes_seen(c, data, n);
        c->left -= n;
        if (c->left == 0) {
            *done = c->framing == SIZED;
            c->framing = CHUNK_END;
            c->size_digits = 0;
        }
        return n;
    case CHUNK_END: /* the CRLF after a chunk */
    case CHUNK_SIZE:
        if (*data == '\n') {
            if (c->framing == CHUNK_END) {
                c->framing = CHUNK_SIZE;
                c->left = 0;
            } else {
                c->framing = c->left ? CHUNK_DATA : TRAILER;
                c->size_digits = 0;
            }
        } else if (c->framing == CHUNK_SIZE && *data != '\r') {
            int digit = *data <= '9' ? *data - '0' : (*data | 32) - 'a' + 10;
            c->left = c->left * 16 + (size_t)digit;
        }
        return 1;
    case TRAILER: /* ends at an empty line */
        if (*data == '\n') {
            *done = c->size_digits == 0;
            c->size_digits = 0;
        } else if (*data != '\r') {
            c->size_digits++;
        }
        return 1;
    case UNTIL_CLOSE:
        body_bytes_seen(c, data, len);
        return len;
    }
    return len;
}

static void readable(struct conn *c)
{
    static char data[65536];
    ssize_t n = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0) {
        if (c->busy) {
            if (c->framing == UNTIL_CLOSE) {
                c->closes = 1;
                ended(c);
                return;
            }
            fail(c, "the connection was closed in the middle of an answer");
            finished++;
            reopen(c);
            release(c);
        } else {
            reopen(c);
            reconnects++;
        }
        return;
    }
    for (size_t at = 0; at < (size_t)n;) {
        int done = 0;
        if (!c->busy) {
            fail(c, "bytes after the end of an answer");
            return;
        }
        at += parse_step(c, data + at, (size_t)n - at, &done);
        if (done)
            ended(c);
    }
}

static double gap_ns(void)
{
    return -log(1 - drand48()) / rate * 1e9;
}

/* Starts `n` requests at the wanted rate and runs until all have ended; 0 when it took too long. */
static int run(long n)
{
    struct epoll_event events[256];
    double next_ns = (double)now_ns();
    uint64_t last_progress = now_ns();
    long before = 0;
    started = finished = 0;
    while (finished < n) {
        uint64_t now = now_ns();
        int none_free = 0;
        while (started < n && next_ns <= (double)now) {
            if (!free_count) {
                none_free = 1;
                break;
            }
            struct conn *c = free_ring[free_head];
            free_head = (free_head + 1) % connections;
            free_count--;
            start(c);
            next_ns += gap_ns();
            if (next_ns < (double)now - 1e6) { /* behind: pace on from here, never in a burst */
                next_ns = (double)now;
                late++;
            }
        }
        double wait_ns = started < n && !none_free ? next_ns - (double)now_ns() : 1e9;
        if (wait_ns < 0)
            wait_ns = 0;
        struct timespec wait = {(time_t)(wait_ns / 1e9), (long)fmod(wait_ns, 1e9)};
        int ready = epoll_pwait2(epoll_fd, events, 256, &wait, NULL);
        for (int i = 0; i < ready; i++)
            readable(events[i].data.ptr);
        if (finished != before || ready) {
            before = finished;
            last_progress = now;
        } else if ((double)(now - last_progress) > hold_s * 1e9) {
            errors += n - finished;
            snprintf(first_error, sizeof first_error, "nothing came for %.0f s", hold_s);
            return 0;
        }
    }
    return 1;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void print_quantiles(const char *name, uint64_t *values)
{
    qsort(values, (size_t)recorded, sizeof *values, by_value);
    double p50 = recorded ? (double)values[recorded / 2] / 1e9 : 0;
    double p99 = recorded ? (double)values[recorded * 99 / 100] / 1e9 : 0;
    printf(", \"%s_p50_s\": %.9f, \"%s_p99_s\": %.9f", name, p50, name, p99);
}

static void options(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (!strcmp(name, "--port")) port = atoi(value);
        else if (!strcmp(name, "--stream")) streamed = atoi(value);
        else if (!strcmp(name, "--connections")) connections = atoi(value);
        else if (!strcmp(name, "--rate")) rate = atof(value);
        else if (!strcmp(name, "--count")) count = atol(value);
        else if (!strcmp(name, "--chunks")) chunks = atoi(value);
        else if (!strcmp(name, "--body-bytes")) body_bytes = atoi(value);
        else if (!strcmp(name, "--hold-s")) hold_s = atof(value);
        else if (!strcmp(name, "--seed")) srand48(atol(value));
        else if (!strcmp(name, "--distinct")) distinct = atoi(value);
        else {
            fprintf(stderr, "load: unknown option %s\n", name);
            exit(2);
        }
    }
}

int main(int argc, char **argv)
{
    options(argc, argv);
    signal(SIGPIPE, SIG_IGN);
    request = make_request(streamed, streamed ? chunks : 16, &request_len);
    request_text = strstr(request, "\"content\":\"") + strlen("\"content\":\"");
    warm_request = make_request(1, 2, &warm_len);
    latency = calloc((size_t)count + 1, sizeof *latency);
    first = calloc((size_t)count + 1, sizeof *first);
    conns = calloc((size_t)connections, sizeof *conns);
    free_ring = calloc((size_t)connections, sizeof *free_ring);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < connections; i++) {
        open_connection(&conns[i]);
        release(&conns[i]);
    }
    double wanted = rate;
    rate = 5000;
    if (!run(connections) || errors) {
        fprintf(stderr, "load: the warm-up failed: %s\n", first_error);
        return 1;
    }
    rate = wanted;
    puts("ready");
    fflush(stdout);
    if (getchar() == EOF)
        return 1;
    measuring = 1;
    late = reconnects = 0;
    total_bytes = 0;
    uint64_t began = now_ns();
    run(count);
    double seconds = (double)(now_ns() - began) / 1e9;
    printf("{\"count\": %ld, \"errors\": %ld, \"reconnects\": %ld, \"late\": %ld, "
           "\"events\": %ld, \"body_bytes\": %lld, \"duration_s\": %.6f",
           finished, errors, reconnects, late, total_events, total_bytes, seconds);
    print_quantiles("latency", latency);
    print_quantiles("first", first);
    printf(", \"first_error\": \"%s\"}\n", first_error);
    return 0;
}
