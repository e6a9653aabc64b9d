using System;
using System.Runtime.InteropServices;
using System.Threading;
using System.Threading.Tasks;

namespace VideoVae
{
    // Encode and decode, for every kind of memory. Nothing is copied: spans are pinned for the time of the call.
    public sealed unsafe partial class Vae
    {
        /// <summary>Video to latent.</summary>
        public void Encode(Tensor video, Tensor latent, RunOptions options = null,
                           CancellationToken token = default(CancellationToken))
        {
            NativeTensor from, to, logvar;
            NativeTensor.Describe(video, &from);
            NativeTensor.Describe(latent, &to);
            using (var call = new RunCall(handle, options?.Progress, token))
            {
                Native.vvae_run_info run;
                call.Describe(options, &run);
                if (options?.LogVariance != null)
                {
                    NativeTensor.Describe(options.LogVariance.Value, &logvar);
                    run.logvar = &logvar.Raw;
                }
                call.Check(Native.vvae_encode(handle, &from.Raw, &to.Raw, &run));
            }
        }

        /// <summary>Latent to video. A smaller or shorter video than the latent stands for is filled from the front.</summary>
        public void Decode(Tensor latent, Tensor video, RunOptions options = null,
                           CancellationToken token = default(CancellationToken))
        {
            NativeTensor from, to;
            NativeTensor.Describe(latent, &from);
            NativeTensor.Describe(video, &to);
            using (var call = new RunCall(handle, options?.Progress, token))
            {
                Native.vvae_run_info run;
                call.Describe(options, &run);
                call.Check(Native.vvae_decode(handle, &from.Raw, &to.Raw, &run));
            }
        }

        /// <summary>
        /// The input frames that a range of the output needs: latent frames for "decode", video frames for "encode".
        /// <paramref name="clipFrames"/> is the number of all input frames of the clip. A count of 0 stands for all
        /// frames up to its end.
        /// </summary>
        public FrameRange RangeInputs(string node, long clipFrames, FrameRange frames)
        {
            long first, count;
            fixed (byte* name = Utf8.Bytes(node))
            {
                Error.Check(Native.vvae_range_inputs(handle, name, clipFrames, frames.First, frames.Count, &first, &count));
            }
            return new FrameRange(first, count);
        }

        /// <summary>
        /// Latent frames from <paramref name="first"/> on, as many as the latent has, the same to the bit as those of the
        /// whole clip. The video has the frames that <see cref="RangeInputs"/> says.
        /// </summary>
        public void EncodeRange(Tensor video, long clipFrames, long first, Tensor latent, RunOptions options = null,
                                CancellationToken token = default(CancellationToken))
        {
            NativeTensor from, to, logvar;
            NativeTensor.Describe(video, &from);
            NativeTensor.Describe(latent, &to);
            using (var call = new RunCall(handle, options?.Progress, token))
            {
                Native.vvae_run_info run;
                call.Describe(options, &run);
                if (options?.LogVariance != null)
                {
                    NativeTensor.Describe(options.LogVariance.Value, &logvar);
                    run.logvar = &logvar.Raw;
                }
                call.Check(Native.vvae_encode_range(handle, &from.Raw, clipFrames, first, &to.Raw, &run));
            }
        }

        /// <summary>
        /// Video frames from <paramref name="first"/> on, as many as the video has, the same to the bit as those of the
        /// whole clip. The latent has the frames that <see cref="RangeInputs"/> says.
        /// </summary>
        public void DecodeRange(Tensor latent, long clipFrames, long first, Tensor video, RunOptions options = null,
                                CancellationToken token = default(CancellationToken))
        {
            NativeTensor from, to;
            NativeTensor.Describe(latent, &from);
            NativeTensor.Describe(video, &to);
            using (var call = new RunCall(handle, options?.Progress, token))
            {
                Native.vvae_run_info run;
                call.Describe(options, &run);
                call.Check(Native.vvae_decode_range(handle, &from.Raw, clipFrames, first, &to.Raw, &run));
            }
        }

        public void EncodeRange<TPixel, TLatent>(ReadOnlySpan<TPixel> video, TensorLayout videoLayout, long clipFrames,
                                                 long first, Span<TLatent> latent, TensorLayout latentLayout,
                                                 RunOptions options = null,
                                                 CancellationToken token = default(CancellationToken))
            where TPixel : struct where TLatent : struct
        {
            fixed (byte* from = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(video)))
            fixed (byte* to = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(latent)))
            {
                EncodeRange(Elements.Pinned<TPixel>(from, video.Length, videoLayout, nameof(video)), clipFrames, first,
                            Elements.Pinned<TLatent>(to, latent.Length, latentLayout, nameof(latent)), options, token);
            }
        }

        public void DecodeRange<TLatent, TPixel>(ReadOnlySpan<TLatent> latent, TensorLayout latentLayout, long clipFrames,
                                                 long first, Span<TPixel> video, TensorLayout videoLayout,
                                                 RunOptions options = null,
                                                 CancellationToken token = default(CancellationToken))
            where TLatent : struct where TPixel : struct
        {
            fixed (byte* from = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(latent)))
            fixed (byte* to = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(video)))
            {
                DecodeRange(Elements.Pinned<TLatent>(from, latent.Length, latentLayout, nameof(latent)), clipFrames, first,
                            Elements.Pinned<TPixel>(to, video.Length, videoLayout, nameof(video)), options, token);
            }
        }

        public void Encode<TPixel, TLatent>(ReadOnlySpan<TPixel> video, TensorLayout videoLayout, Span<TLatent> latent,
                                            TensorLayout latentLayout, RunOptions options = null,
                                            CancellationToken token = default(CancellationToken))
            where TPixel : struct where TLatent : struct
        {
            fixed (byte* from = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(video)))
            fixed (byte* to = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(latent)))
            {
                Encode(Elements.Pinned<TPixel>(from, video.Length, videoLayout, nameof(video)),
                       Elements.Pinned<TLatent>(to, latent.Length, latentLayout, nameof(latent)), options, token);
            }
        }

        /// <summary>Mean (or sample) and log-variance, both in the layout of the latent.</summary>
        public void Encode<TPixel, TLatent>(ReadOnlySpan<TPixel> video, TensorLayout videoLayout, Span<TLatent> latent,
                                            Span<TLatent> logVariance, TensorLayout latentLayout, RunOptions options = null,
                                            CancellationToken token = default(CancellationToken))
            where TPixel : struct where TLatent : struct
        {
            fixed (byte* second = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(logVariance)))
            {
                var both = new RunOptions
                {
                    Progress = options?.Progress, CudaStream = options?.CudaStream,
                    LogVariance = Elements.Pinned<TLatent>(second, logVariance.Length, latentLayout, nameof(logVariance)),
                };
                Encode(video, videoLayout, latent, latentLayout, both, token);
            }
        }

        public void Decode<TLatent, TPixel>(ReadOnlySpan<TLatent> latent, TensorLayout latentLayout, Span<TPixel> video,
                                            TensorLayout videoLayout, RunOptions options = null,
                                            CancellationToken token = default(CancellationToken))
            where TLatent : struct where TPixel : struct
        {
            fixed (byte* from = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(latent)))
            fixed (byte* to = &MemoryMarshal.GetReference(MemoryMarshal.AsBytes(video)))
            {
                Decode(Elements.Pinned<TLatent>(from, latent.Length, latentLayout, nameof(latent)),
                       Elements.Pinned<TPixel>(to, video.Length, videoLayout, nameof(video)), options, token);
            }
        }

        // Arrays, which the compiler does not turn into spans of an unknown type by itself.
        public void Encode<TPixel, TLatent>(TPixel[] video, TensorLayout videoLayout, TLatent[] latent, TensorLayout latentLayout,
                                            RunOptions options = null, CancellationToken token = default(CancellationToken))
            where TPixel : struct where TLatent : struct
        {
            Encode(new ReadOnlySpan<TPixel>(video), videoLayout, new Span<TLatent>(latent), latentLayout, options, token);
        }

        public void Decode<TLatent, TPixel>(TLatent[] latent, TensorLayout latentLayout, TPixel[] video, TensorLayout videoLayout,
                                            RunOptions options = null, CancellationToken token = default(CancellationToken))
            where TLatent : struct where TPixel : struct
        {
            Decode(new ReadOnlySpan<TLatent>(latent), latentLayout, new Span<TPixel>(video), videoLayout, options, token);
        }

        /// <summary>Encodes on a thread of the pool. The memory must stay untouched until the task ends.</summary>
        public Task EncodeAsync<TPixel, TLatent>(ReadOnlyMemory<TPixel> video, TensorLayout videoLayout, Memory<TLatent> latent,
                                                 TensorLayout latentLayout, RunOptions options = null,
                                                 CancellationToken token = default(CancellationToken))
            where TPixel : struct where TLatent : struct
        {
            return Task.Run(() => Encode(video.Span, videoLayout, latent.Span, latentLayout, options, token), token);
        }

        /// <summary>Decodes on a thread of the pool. The memory must stay untouched until the task ends.</summary>
        public Task DecodeAsync<TLatent, TPixel>(ReadOnlyMemory<TLatent> latent, TensorLayout latentLayout, Memory<TPixel> video,
                                                 TensorLayout videoLayout, RunOptions options = null,
                                                 CancellationToken token = default(CancellationToken))
            where TLatent : struct where TPixel : struct
        {
            return Task.Run(() => Decode(latent.Span, latentLayout, video.Span, videoLayout, options, token), token);
        }
    }
}
