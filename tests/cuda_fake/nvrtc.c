/* A libnvrtc that compiles nothing: its image is an ELF header and the source's names of kernels. */
#define _GNU_SOURCE
#include <elf.h>
#include <stdlib.h>
#include <string.h>

enum { NVRTC_SUCCESS = 0, NVRTC_ERROR_INVALID_INPUT = 3, NVRTC_ERROR_INVALID_OPTION = 5, NVRTC_ERROR_COMPILATION = 6 };

struct program {
    char *source, *image;
    size_t nbytes;
};

int nvrtcVersion(int *major, int *minor) {
    *major = 12, *minor = 0;
    return NVRTC_SUCCESS;
}

int nvrtcCreateProgram(struct program **program, const char *source, const char *name, int nheaders,
                       const char *const *headers, const char *const *includes) {
    (void)name, (void)headers, (void)includes;
    if (nheaders) return NVRTC_ERROR_INVALID_INPUT;
    *program = calloc(1, sizeof **program);
    (*program)->source = strdup(source);
    return NVRTC_SUCCESS;
}

int nvrtcCompileProgram(struct program *program, int noptions, const char *const *options) {
    if (noptions != 1 || strcmp(options[0], "--gpu-architecture=sm_90")) return NVRTC_ERROR_INVALID_OPTION;
    Elf64_Ehdr elf = {.e_ident = ELFMAG};
    char *out = program->image = malloc(sizeof elf + strlen(program->source)), *at = out + sizeof elf;
    for (const char *found = program->source; (found = strstr(found, "__global__ void ")); ) {
        found += strlen("__global__ void ");
        size_t n = strcspn(found, "(");
        memcpy(at, found, n);
        at[n] = 0;
        at += n + 1;
    }
    program->nbytes = elf.e_shoff = at - out;
    memcpy(out, &elf, sizeof elf);
    return at == out + sizeof elf ? NVRTC_ERROR_COMPILATION : NVRTC_SUCCESS;
}

int nvrtcGetCUBINSize(struct program *program, size_t *nbytes) {
    *nbytes = program->nbytes;
    return NVRTC_SUCCESS;
}

int nvrtcGetCUBIN(struct program *program, char *out) {
    memcpy(out, program->image, program->nbytes);
    return NVRTC_SUCCESS;
}

int nvrtcDestroyProgram(struct program **program) {
    free((*program)->source);
    free((*program)->image);
    free(*program);
    *program = NULL;
    return NVRTC_SUCCESS;
}
