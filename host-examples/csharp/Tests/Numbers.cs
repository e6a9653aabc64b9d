// What comes out: goldens, kinds of memory, streams.
using System;
using System.Linq;
using System.Runtime.InteropServices;
using VideoVae;

internal static partial class Program
{
    private static void Goldens()
    {
        foreach (string name in new[] { "small-image", "small-clip5", "small-clip17", "small-batch2", "medium-clip9" })
        {
            var golden = new Golden($"{folder}/{name}.safetensors");
            using (Vae vae = Open(name.Split('-')[0]))
            {
                Shape latent = golden.Shape("encode_mean"), video = golden.Shape("encode_video");
                Check.That(vae.Model.LatentOf(video).Equals(latent) && vae.Model.VideoOf(latent).Equals(video), "shapes");
                float[] mean = new float[latent.Elements], logvar = new float[latent.Elements];
                vae.Encode<float, float>(golden.Values("encode_video"), video, mean, logvar, latent);
                Check.Close(mean, golden.Values("encode_mean"), name + " mean");
                Check.Close(logvar, golden.Values("encode_logvar"), name + " logvar");
                var decoded = new float[golden.Shape("decode_video").Elements];
                vae.Decode(golden.Values("decode_latent"), golden.Shape("decode_latent"), decoded, golden.Shape("decode_video"));
                Check.Close(decoded, golden.Values("decode_video"), name + " video");
            }
        }
    }

    /// <summary>Arrays, spans, memory on another thread and native memory: the same numbers.</summary>
    private static unsafe void MemoryKinds()
    {
        using (Vae vae = Open())
        {
            var shape = new Shape(1, 16, 2, 2, 3);
            float[] latent = Noise(shape.Elements, 1);
            TensorLayout pixels = TensorLayout.Interleaved(5, 16, 24);
            byte[] array = new byte[pixels.Shape.Elements], span = new byte[array.Length + 10], memory = new byte[array.Length];
            vae.Decode(latent, shape, array, pixels);
            Check.That(array.Distinct().Count() > 10, "the picture is flat");

            vae.Decode<float, byte>(latent, shape, new Span<byte>(span, 10, array.Length), pixels);
            Check.That(span.Skip(10).SequenceEqual(array) && span.Take(10).All(b => b == 0), "span");

            vae.DecodeAsync<float, byte>(latent, shape, memory, pixels).Wait();
            Check.That(memory.SequenceEqual(array), "memory");

            IntPtr native = Marshal.AllocHGlobal(array.Length);
            try
            {
                fixed (float* pinned = latent)
                {
                    vae.Decode(new Tensor((IntPtr)pinned, ElementType.Float32, shape),
                               new Tensor(native, ElementType.UInt8, pixels));
                }
                Marshal.Copy(native, memory, 0, memory.Length);
                Check.That(memory.SequenceEqual(array), "native memory");
            }
            finally
            {
                Marshal.FreeHGlobal(native);
            }

            // 16-bit floats travel as ushort, told by the layout.
            var halves = new ushort[pixels.Shape.Elements];
            vae.Decode(latent, shape, halves, new TensorLayout(pixels.Shape).Of(ElementType.Float16));
            Check.That(halves.All(h => (h & 0x7c00) != 0x7c00), "halves are numbers");

            Check.Throws<ArgumentException>(() => vae.Decode(latent, shape, new byte[array.Length - 1], pixels), "holds 5759 elements");
            Check.Throws<ArgumentException>(() => vae.Decode(latent, shape, new int[array.Length], pixels), "no element type");
            Check.Throws<ArgumentException>(
                () => vae.Decode(latent, shape, new byte[array.Length], pixels.Of(ElementType.Float32)), "Byte does not hold");
        }
    }

    /// <summary>In pieces of every size: the bits of the whole.</summary>
    private static void Streams()
    {
        using (Vae vae = Open())
        {
            var shape = new Shape(1, 16, 5, 2, 3);
            float[] latent = Noise(shape.Elements, 2);
            TensorLayout pixels = TensorLayout.Interleaved(17, 16, 24);
            byte[] whole = new byte[pixels.Shape.Elements], streamed = new byte[whole.Length];
            vae.Decode(latent, shape, whole, pixels);
            int frame = 16 * 24 * 3;
            for (int piece = 1; piece <= 5; piece++)
            {
                Array.Clear(streamed, 0, streamed.Length);
                using (VaeStream stream = vae.OpenStream("decode", shape))
                {
                    Check.That(vae.Memory.Streams == 1, "the stream is counted");
                    long pushed = 0, pulled = 0;
                    var status = VaeStatus.Again;
                    var room = new byte[piece * frame];
                    while (status == VaeStatus.Again)
                    {
                        long count = Math.Min(piece, shape.Frames - pushed);
                        if (count > 0)
                        {
                            // A piece of a compact tensor: its own number of frames, the strides of the whole.
                            var strides = new Shape(0, shape.Frames * 6, 6, 3, 1);
                            pushed += stream.Push(new ReadOnlySpan<float>(latent, (int)pushed * 6, latent.Length - (int)pushed * 6),
                                                  new TensorLayout(shape.WithFrames(count), strides));
                        }
                        else
                        {
                            stream.Finish();
                        }
                        while (true)
                        {
                            Pulled got = stream.Pull<byte>(room, TensorLayout.Interleaved(piece, 16, 24));
                            status = got.Status;
                            if (status != VaeStatus.Ok) break;
                            Array.Copy(room, 0, streamed, pulled * frame, got.Frames * frame);
                            pulled += got.Frames;
                        }
                    }
                    Check.That(status == VaeStatus.End && pulled == 17, "the stream ends");
                }
                Check.That(vae.Memory.Streams == 0 && streamed.SequenceEqual(whole), $"pieces of {piece}");
            }
            Resumed(vae, latent, shape, whole.Skip(whole.Length - frame).ToArray());
        }
    }

    /// <summary>Some frames of a clip, from the input that they need: the bits of the whole.</summary>
    /// <summary>Several devices: the numbers of one, and the figures of each.</summary>
    private static void Devices()
    {
        var shape = new Shape(1, 16, 33, 2, 2);
        var videoShape = new Shape(1, 3, 129, 16, 16);
        float[] latent = Noise(shape.Elements, 5), one = new float[videoShape.Elements], two = new float[videoShape.Elements];
        using (Vae vae = Open())
        {
            vae.Decode(latent, shape, one, videoShape);
            Check.That(vae.Devices.Length == 1 && vae.Devices[0].Id == "cpu" && vae.Devices[0].Frames == 129, "one device");
        }
        using (var vae = new Vae($"{folder}/small.safetensors", "cpu,cpu"))
        {
            vae.Decode(latent, shape, two, videoShape);
            VaeDeviceShare[] devices = vae.Devices;
            Check.That(two.SequenceEqual(one), "several devices");
            Check.That(devices.Length == 2 && devices[0].Frames + devices[1].Frames == 129 && devices[1].IsUsed, "shares");
            Check.That(devices[0].Peak + devices[1].Peak == vae.Memory.Peak, "memory");
        }
        Check.Throws<VaeDeviceException>(() => new Vae($"{folder}/small.safetensors", "cpu,"), "device");
    }

    private static void Ranges()
    {
        using (Vae vae = Open())
        {
            var latentShape = new Shape(1, 16, 33, 2, 3);
            var videoShape = new Shape(1, 3, 129, 16, 24);
            float[] latent = Noise(latentShape.Elements, 3), video = new float[videoShape.Elements];
            var encoded = new float[latentShape.Elements];
            vae.Decode(latent, latentShape, video, videoShape);
            vae.Encode(video, videoShape, encoded, latentShape);
            foreach (var frames in new[] { new FrameRange(0, 1), new FrameRange(117, 6), new FrameRange(128, 1) })
            {
                FrameRange inputs = vae.RangeInputs("decode", 33, frames);
                float[] part = Frames(latent, latentShape, inputs), expected = Frames(video, videoShape, frames);
                var found = new float[expected.Length];
                vae.DecodeRange<float, float>(part, latentShape.WithFrames(inputs.Count), 33, frames.First, found,
                                              videoShape.WithFrames(frames.Count));
                Check.That(found.SequenceEqual(expected), $"decode from {frames.First}");
            }
            var last = new FrameRange(30, 3);
            FrameRange needed = vae.RangeInputs("encode", 129, last);
            Check.That(needed.First > 0 && needed.First + needed.Count == 129, "frames that encode needs");
            var made = new float[16 * last.Count * 6];
            vae.EncodeRange<float, float>(Frames(video, videoShape, needed), videoShape.WithFrames(needed.Count), 129, 30, made,
                                          latentShape.WithFrames(last.Count));
            Check.That(made.SequenceEqual(Frames(encoded, latentShape, last)), "encode from 30");

            VaePlan plan = vae.PlanRange("decode", latentShape, new FrameRange(40, 8));
            Check.That(plan.Output.Frames == 8 && plan.ToString().Contains("frames 40 to 47"), "the plan of a range");
            Check.Throws<VaeArgumentException>(() => vae.RangeInputs("decode", 33, new FrameRange(129, 1)), "129 video frames");
            using (VaeStream stream = vae.OpenStream("decode", latentShape, 127))
            {
                FrameRange rest = vae.RangeInputs("decode", 33, new FrameRange(127, 0));
                float[] input = Frames(latent, latentShape, rest), room = new float[3 * 16 * 24];
                long pushed = 0;
                for (var status = VaeStatus.Again; status != VaeStatus.Ok;)
                {
                    if (pushed < rest.Count)
                    {
                        var one = Frames(input, latentShape.WithFrames(rest.Count), new FrameRange(pushed, 1));
                        pushed += stream.Push<float>(one, latentShape.WithFrames(1));
                    }
                    else
                    {
                        stream.Finish();
                    }
                    status = stream.Pull<float>(room, videoShape.WithFrames(1)).Status;
                }
                Check.That(room.SequenceEqual(Frames(video, videoShape, new FrameRange(127, 1))), "a stream from frame 127");
            }
        }
    }

    /// <summary>Some frames of a compact clip.</summary>
    private static float[] Frames(float[] clip, Shape shape, FrameRange frames)
    {
        int plane = (int)(shape.Height * shape.Width), all = (int)shape.Frames * plane, some = (int)frames.Count * plane;
        var part = new float[shape.Batch * shape.Channels * some];
        for (int channel = 0; channel < shape.Batch * shape.Channels; channel++)
        {
            Array.Copy(clip, channel * all + (int)frames.First * plane, part, channel * some, some);
        }
        return part;
    }

    /// <summary>A stream that is left, and resumed by another one at the frame that comes next, ends with the same last frame.</summary>
    private static void Resumed(Vae vae, float[] latent, Shape shape, byte[] last)
    {
        var room = new byte[last.Length];
        TensorLayout one = TensorLayout.Interleaved(1, 16, 24);
        Func<VaeStream, long, long, long> advance = (stream, from, to) =>
        {
            long pulled = 0;
            while (from < to)
            {
                var strides = new Shape(0, shape.Frames * 6, 6, 3, 1);
                var rest = new ReadOnlySpan<float>(latent, (int)from * 6, latent.Length - (int)from * 6);
                from += stream.Push(rest, new TensorLayout(shape.WithFrames(to - from), strides));
                while (stream.Pull<byte>(room, one).Status == VaeStatus.Ok) pulled++;
            }
            return pulled;
        };
        long next;
        using (VaeStream first = vae.OpenStream("decode", shape)) next = advance(first, 0, 3);
        FrameRange needed = vae.RangeInputs("decode", shape.Frames, new FrameRange(next, 0));
        using (VaeStream second = vae.OpenStream("decode", shape, next))
        {
            advance(second, needed.First, shape.Frames);
            second.Finish();
            while (second.Pull<byte>(room, one).Status == VaeStatus.Ok) { }
            Check.That(room.SequenceEqual(last), "a resumed stream has the bits of an uninterrupted one");
        }
    }
}
