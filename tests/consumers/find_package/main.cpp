#include <attn/attn.h>
int main() { return attn_version() == nullptr; }
