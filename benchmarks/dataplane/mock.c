/* A mock vLLM instance that costs next to nothing: one thread, epoll, fixed answers.
 *
 *   mock --port P [--interval-ms 15] [--first-ms 5] [--model bench]
 *
 * POST /v1/chat/completions  streamed: headers at once, as vLLM does, then a role chunk after
 *                            first-ms, max_tokens deltas of 250 bytes on the wire one interval
 *                            apart, a usage chunk, [DONE]; else 1 KB of JSON with usage
 * any other POST            vLLM's 403 for what is switched off
 * GET /v1/models /health /metrics and whatever else a router asks for when it starts
 *
 * It answers every request the same way and checks nothing: it is a load, not a fake.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
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

#define CHUNK_BYTES 250 /* one delta on the wire, chunk framing included */
#define MARKS 16        /* tildes in each delta: the load counts them */
#define JSON_BYTES 1024 /* a non-streamed answer's body */

struct conn {
    int fd;
    char *in;          /* what has been read and not yet answered */
    size_t in_len, in_cap;
    char *out;         /* what the socket would not take */
    size_t out_len, out_cap;
    int streaming;
    int left;          /* deltas still to send; -1 before the role chunk */
    int total;
    int want_usage;
    uint64_t due_ns;
    int heap_index;    /* -1 when not in the heap */
};

static int epoll_fd;
static uint64_t interval_ns = 15000000, first_ns = 5000000;
static const char *model = "bench";
static long running, served;
static char delta[CHUNK_BYTES + 1], role[512], json_answer[JSON_BYTES + 512];
static size_t role_len, json_len;
static char *varying; /* a character of the delta's text */

static struct conn **heap;
static int heap_len, heap_cap;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void heap_place(int i, struct conn *c)
{
    heap[i] = c;
    c->heap_index = i;
}

static void heap_fix(int i)
{
    struct conn *c = heap[i];
    while (i > 0 && heap[(i - 1) / 2]->due_ns > c->due_ns) {
        heap_place(i, heap[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    for (;;) {
        int child = 2 * i + 1;
        if (child >= heap_len)
            break;
        if (child + 1 < heap_len && heap[child + 1]->due_ns < heap[child]->due_ns)
            child++;
        if (heap[child]->due_ns >= c->due_ns)
            break;
        heap_place(i, heap[child]);
        i = child;
    }
    heap_place(i, c);
}

static void heap_add(struct conn *c)
{
    if (heap_len == heap_cap) {
        heap_cap = heap_cap ? heap_cap * 2 : 256;
        heap = realloc(heap, (size_t)heap_cap * sizeof *heap);
    }
    heap_place(heap_len++, c);
    heap_fix(heap_len - 1);
}

static void heap_remove(struct conn *c)
{
    int i = c->heap_index;
    if (i < 0)
        return;
    c->heap_index = -1;
    struct conn *last = heap[--heap_len];
    if (last != c) {
        heap_place(i, last);
        heap_fix(i);
    }
}

static void drop(struct conn *c)
{
    if (c->streaming)
        running--;
    heap_remove(c);
    close(c->fd);
    free(c->in);
    free(c->out);
    c->fd = -1;
    free(c);
}

static void grow(char **buffer, size_t *cap, size_t wanted)
{
    if (wanted <= *cap)
        return;
    *cap = wanted * 2;
    *buffer = realloc(*buffer, *cap);
}

/* Returns -1 when the peer has gone; then the connection still has to be dropped. */
static int send_bytes(struct conn *c, const char *data, size_t len)
{
    if (c->out_len == 0) {
        ssize_t n = send(c->fd, data, len, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN)
            return -1;
        if (n > 0) {
            data += n;
            len -= (size_t)n;
        }
        if (len == 0)
            return 0;
        struct epoll_event e = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
    }
    grow(&c->out, &c->out_cap, c->out_len + len);
    memcpy(c->out + c->out_len, data, len);
    c->out_len += len;
    return 0;
}

static int flush_out(struct conn *c)
{
    ssize_t n = send(c->fd, c->out, c->out_len, MSG_NOSIGNAL);
    if (n < 0)
        return errno == EAGAIN ? 0 : -1;
    memmove(c->out, c->out + n, c->out_len - (size_t)n);
    c->out_len -= (size_t)n;
    if (c->out_len == 0) {
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
    }
    return 0;
}

/* vLLM's answer to /v1/chat/completions/render without --enable-scale-out; vllm-router's default
 * policy asks it before each request. */
static const char refusal[] =
    "HTTP/1.1 403 Forbidden\r\nserver: uvicorn\r\ncontent-length: 112\r\n"
    "content-type: application/json\r\n\r\n{\"error\":{\"message\":\"Scale-out endpoints are disabled.\","
    "\"type\":\"PermissionDeniedError\",\"param\":null,\"code\":403}}";

#define ID "\"id\":\"chatcmpl-a48c369606926c44\",\"object\":\"chat.completion.chunk\",\"created\":1795194305"

static size_t chunk_of(char *to, size_t size, const char *event)
{
    return (size_t)snprintf(to, size, "%zx\r\n%s\r\n", strlen(event), event);
}

static void make_answers(void)
{
    char event[512], words[CHUNK_BYTES], format[] =
        "data: {" ID ",\"model\":\"%s\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s\"},"
        "\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n";
    snprintf(event, sizeof event,
             "data: {" ID ",\"model\":\"%s\",\"choices\":[{\"index\":0,\"delta\":{\"role\":"
             "\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n", model);
    role_len = chunk_of(role, sizeof role, event);
    for (int pad = MARKS + 1; pad < 100; pad++) { /* fill the delta's text up to the wanted size */
        memset(words, ' ', (size_t)pad);
        memset(words, '~', MARKS);
        words[pad] = 0;
        snprintf(event, sizeof event, format, model, words);
        if (strlen(event) + 6 >= CHUNK_BYTES) /* two hex digits, two CRLFs */
            break;
    }
    char whole[1024];
    size_t len = chunk_of(whole, sizeof whole, event);
    if (len != CHUNK_BYTES) {
        fprintf(stderr, "mock: a delta of %zu bytes: take a shorter model name\n", len);
        exit(2);
    }
    memcpy(delta, whole, len);
    varying = strchr(delta, '~') + MARKS;
    char body[JSON_BYTES + 1], text[JSON_BYTES];
    memset(text, 'y', sizeof text);
    for (size_t pad = 16; pad < sizeof text; pad++) {
        text[pad] = 0;
        int n = snprintf(body, sizeof body,
            "{\"id\":\"chatcmpl-bd3614e25a40fe92\",\"object\":\"chat.completion\",\"created\":1795194305,"
            "\"model\":\"%s\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
            "\"%s\",\"refusal\":null},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}],"
            "\"usage\":{\"prompt_tokens\":230,\"total_tokens\":246,\"completion_tokens\":16,"
            "\"prompt_tokens_details\":null},\"prompt_logprobs\":null}", model, text);
        text[pad] = 'y';
        if (n >= JSON_BYTES)
            break;
    }
    json_len = (size_t)snprintf(json_answer, sizeof json_answer,
        "HTTP/1.1 200 OK\r\ndate: Fri, 20 Nov 2026 17:05:04 GMT\r\nserver: uvicorn\r\n"
        "content-length: %zu\r\ncontent-type: application/json\r\n\r\n%s", strlen(body), body);
}

static int answer_get(struct conn *c, const char *path)
{
    char body[1024], head[256];
    const char *type = "application/json";
    if (!strncmp(path, "/v1/models", 10)) {
        snprintf(body, sizeof body,
                 "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1795194305,"
                 "\"owned_by\":\"vllm\",\"root\":\"%s\",\"parent\":null,\"max_model_len\":8192}]}",
                 model, model);
    } else if (!strncmp(path, "/metrics", 8)) {
        type = "text/plain; version=0.0.4; charset=utf-8";
        snprintf(body, sizeof body,
                 "# TYPE vllm:num_requests_running gauge\n"
                 "vllm:num_requests_running{engine=\"0\",model_name=\"%s\"} %ld\n"
                 "# TYPE vllm:num_requests_waiting gauge\n"
                 "vllm:num_requests_waiting{engine=\"0\",model_name=\"%s\"} 0\n"
                 "# TYPE vllm:kv_cache_usage_perc gauge\n"
                 "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"%s\"} 0\n"
                 "# TYPE mock_requests_total counter\nmock_requests_total %ld\n",
                 model, running, model, model, served);
    } else if (!strncmp(path, "/health", 7)) {
        body[0] = 0;
    } else {
        snprintf(body, sizeof body, "{\"model_path\":\"%s\",\"version\":\"0.32.0\"}", model);
    }
    int n = snprintf(head, sizeof head,
                     "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: %s\r\n\r\n",
                     strlen(body), type);
    if (send_bytes(c, head, (size_t)n) < 0)
        return -1;
    return body[0] ? send_bytes(c, body, strlen(body)) : 0;
}

/* The value of a top-level looking field: good enough for bodies that a load generator wrote. */
static const char *field(const char *body, size_t len, const char *name)
{
    const char *at = memmem(body, len, name, strlen(name));
    if (!at)
        return NULL;
    at += strlen(name);
    while (at < body + len && (*at == ' ' || *at == ':'))
        at++;
    return at < body + len ? at : NULL;
}

static int answer_chat(struct conn *c, const char *body, size_t len)
{
    served++;
    const char *stream = field(body, len, "\"stream\"");
    if (!stream || *stream != 't')
        return send_bytes(c, json_answer, json_len);
    const char *count = field(body, len, "\"max_tokens\"");
    if (!count) /* sglang-router renames it */
        count = field(body, len, "\"max_completion_tokens\"");
    const char *usage = field(body, len, "\"include_usage\"");
    c->total = count ? atoi(count) : 16;
    c->want_usage = usage && *usage == 't';
    c->left = -1;
    c->streaming = 1;
    running++;
    c->due_ns = now_ns() + first_ns;
    heap_add(c);
    static const char head[] =
        "HTTP/1.1 200 OK\r\ndate: Fri, 20 Nov 2026 17:05:04 GMT\r\nserver: uvicorn\r\n"
        "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    return send_bytes(c, head, sizeof head - 1);
}

static int finish_stream(struct conn *c)
{
    char last[1536], event[512];
    memcpy(last, delta, CHUNK_BYTES);
    size_t len = CHUNK_BYTES;
    if (c->want_usage) {
        snprintf(event, sizeof event,
                 "data: {" ID ",\"model\":\"%s\",\"choices\":[],\"usage\":{\"prompt_tokens\":230,"
                 "\"total_tokens\":%d,\"completion_tokens\":%d}}\n\n",
                 model, 230 + c->total, c->total);
        len += chunk_of(last + len, sizeof last - len, event);
    }
    static const char done[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    memcpy(last + len, done, sizeof done - 1);
    c->streaming = 0;
    running--;
    return send_bytes(c, last, len + sizeof done - 1);
}

/* 1: one request answered; 0: more bytes needed; -1: drop the connection. */
static int answer_one(struct conn *c)
{
    if (c->streaming || c->in_len == 0)
        return 0;
    char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
    if (!end)
        return c->in_len > 65536 ? -1 : 0;
    size_t head_len = (size_t)(end - c->in) + 4, body_len = 0, used = head_len;
    int chunked = 0;
    for (char *line = memchr(c->in, '\n', head_len); line && line < end; line = memchr(line, '\n', (size_t)(end - line))) {
        line++;
        if (!strncasecmp(line, "content-length:", 15))
            body_len = strtoul(line + 15, NULL, 10);
        else if (!strncasecmp(line, "transfer-encoding:", 18))
            chunked = 1;
    }
    if (chunked) {
        char *stop = memmem(end + 2, c->in_len - head_len + 2, "\r\n0\r\n\r\n", 7);
        if (!stop)
            return 0;
        body_len = (size_t)(stop + 7 - c->in) - head_len;
    }
    used += body_len;
    if (c->in_len < used)
        return 0;
    int result;
    if (!strncmp(c->in, "POST /v1/chat/completions ", 26))
        result = answer_chat(c, c->in + head_len, body_len);
    else if (!strncmp(c->in, "POST ", 5))
        result = send_bytes(c, refusal, sizeof refusal - 1);
    else
        result = answer_get(c, memchr(c->in, ' ', head_len) ? strchr(c->in, ' ') + 1 : "/");
    if (result < 0)
        return -1;
    memmove(c->in, c->in + used, c->in_len - used);
    c->in_len -= used;
    return 1;
}

static int readable(struct conn *c)
{
    for (;;) {
        grow(&c->in, &c->in_cap, c->in_len + 4096);
        ssize_t n = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len - 1, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN))
            return -1;
        if (n < 0)
            break;
        c->in_len += (size_t)n;
        c->in[c->in_len] = 0;
        if (c->in_len + 1 < c->in_cap)
            break; /* it gave less than asked for: nothing is left */
    }
    int result;
    while ((result = answer_one(c)) > 0)
        ;
    return result;
}

static void accept_all(int listener)
{
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct conn *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->heap_index = -1;
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    }
}

/* Sends whatever is due; returns nanoseconds until the next tick, or -1 for none. */
static int64_t tick(void)
{
    while (heap_len) {
        struct conn *c = heap[0];
        uint64_t now = now_ns();
        if (c->due_ns > now)
            return (int64_t)(c->due_ns - now);
        int result;
        if (c->left < 0) {
            c->left = c->total;
            result = send_bytes(c, role, role_len);
        } else if (--c->left > 0) {
            *varying = (char)('a' + c->left % 16); /* LiteLLM breaks off 100 equal chunks */
            result = send_bytes(c, delta, CHUNK_BYTES);
        } else {
            heap_remove(c);
            result = finish_stream(c);
            while (result >= 0 && (result = answer_one(c)) > 0)
                ;
            if (result < 0)
                drop(c);
            continue;
        }
        if (result < 0) {
            drop(c);
            continue;
        }
        c->due_ns += interval_ns;
        heap_fix(0);
    }
    return -1;
}

static int listen_on(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) < 0 || listen(fd, 4096) < 0) {
        perror("mock: cannot listen");
        exit(1);
    }
    return fd;
}

int main(int argc, char **argv)
{
    int port = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--port"))
            port = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--interval-ms"))
            interval_ns = (uint64_t)(atof(argv[i + 1]) * 1e6);
        else if (!strcmp(argv[i], "--first-ms"))
            first_ns = (uint64_t)(atof(argv[i + 1]) * 1e6);
        else if (!strcmp(argv[i], "--model"))
            model = argv[i + 1];
        else {
            fprintf(stderr, "mock: unknown option %s\n", argv[i]);
            return 2;
        }
    }
    signal(SIGPIPE, SIG_IGN);
    make_answers();
    int listener = listen_on(port);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL}, events[256];
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &e);
    for (;;) {
        int64_t wait_ns = tick();
        struct timespec wait = {wait_ns / 1000000000, wait_ns % 1000000000};
        int n = epoll_pwait2(epoll_fd, events, 256, wait_ns < 0 ? NULL : &wait, NULL);
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            if (!c) {
                accept_all(listener);
                continue;
            }
            int result = 0;
            if (events[i].events & EPOLLOUT)
                result = flush_out(c);
            if (result >= 0 && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                result = readable(c);
            if (result < 0)
                drop(c);
        }
    }
}
