// engram_server/digest.cu as a function of the CPU. -DKERNEL='"path"'

#include "warp.h"

#include KERNEL

static const Piece* all_pieces;
static Digest* all_digests;

extern "C" void digest_on_cpu(const Piece* pieces, Digest* digests, unsigned count) {
    all_pieces = pieces, all_digests = digests;
    for (unsigned k = 0; k < count; ++k) warp::run([] { digest_pieces(all_pieces, all_digests); }, k);
}
