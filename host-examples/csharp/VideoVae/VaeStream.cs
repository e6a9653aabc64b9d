using System;
using System.Runtime.InteropServices;
using System.Threading;

namespace VideoVae
{
    /// <summary>Frames that a pull gave, and what comes next.</summary>
    public struct Pulled
    {
        /// <summary>Ok: go on pulling. Again: nothing until more is pushed. End: everything has been pulled.</summary>
        public VaeStatus Status { get; internal set; }
        public long Frames { get; internal set; }
    }

    /// <summary>
    /// A clip of any length in pieces, at constant memory, with the same bits as the whole clip at once. Push until not all is
    /// taken, pull until it says Again, and so on; Finish after the last frame; pull until End.
    /// </summary>
    public sealed unsafe class VaeStream : IDisposable
    {
        private readonly StreamHandle handle;
        private readonly VaeHandle vae; // cancelling is a matter of the vae

        internal VaeStream(StreamHandle handle, VaeHandle vae)
        {
            this.handle = handle;
            this.vae = vae;
        }

        public void Dispose()
        {
            handle.Dispose();
        }

        /// <summary>Offers frames, and says how many were taken from the front. If not all: pull, then push the rest.</summary>
        public long Push(Tensor frames)
        {
            NativeTensor from;
            NativeTensor.Describe(frames, &from);
            long taken = 0;
            Error.Check(Native.vvae_stream_push(handle, &from.Raw, &taken));
            return taken;
        }

        public long Push<T>(ReadOnlySpan<T> frames, TensorLayout layout) where T : struct
        {
            fixed (byte* data = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(frames)))
            {
                return Push(Elements.Pinned<T>(data, frames.Length, layout, nameof(frames)));
            }
        }

        /// <summary>Says that the clip is complete.</summary>
        public void Finish()
        {
            Error.Check(Native.vvae_stream_push(handle, null, null));
        }

        /// <summary>Computes and writes what is ready, from the front of <paramref name="room"/>.</summary>
        public Pulled Pull(Tensor room, RunOptions options = null, CancellationToken token = default(CancellationToken))
        {
            NativeTensor to;
            NativeTensor.Describe(room, &to);
            using (var call = new RunCall(vae, options?.Progress, token))
            {
                Native.vvae_run_info run;
                call.Describe(options, &run);
                long written = 0;
                int status = Native.vvae_stream_pull(handle, &to.Raw, &run, &written);
                return new Pulled { Status = call.Check(status, written), Frames = written };
            }
        }

        public Pulled Pull<T>(Span<T> room, TensorLayout layout, RunOptions options = null,
                              CancellationToken token = default(CancellationToken)) where T : struct
        {
            fixed (byte* data = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(room)))
            {
                return Pull(Elements.Pinned<T>(data, room.Length, layout, nameof(room)), options, token);
            }
        }
    }
}
