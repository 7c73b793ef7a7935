/* Says its arguments, and ends with a status of its own. With -DGO it looks to others as Go's linker leaves programs, with
 * -DLARGE as it leaves those of several megabytes. */
#include <stdio.h>

#ifdef LARGE
__attribute__((used)) static char code[4 << 20] = {1};
#define DATA
#else
#define DATA const
#endif
#ifdef GO
__attribute__((section(".go.buildinfo"), used, aligned(16))) static DATA char build_info[32] = "\xff Go buildinf:\x08\x02";
__attribute__((section(".note.go.buildid"), used, aligned(4))) static const struct {
    unsigned name_length, text_length, type;
    char name[4], text[8];
} build_id = {4, 8, 4, "Go\0", "lane/go"};
#endif

int main(int argc, char **argv) {
    for (int number = 1; number < argc; number++) printf("%s\n", argv[number]);
    printf("hello\n");
    return 7;
}
