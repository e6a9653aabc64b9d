// What is left behind: nothing, whatever the garbage collector does when.
using System;
using System.Diagnostics;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;
using VideoVae;

internal static partial class Program
{
    private static long MemoryOfProcess()
    {
        GC.Collect();
        GC.WaitForPendingFinalizers();
        GC.Collect();
        using (Process process = Process.GetCurrentProcess()) return process.WorkingSet64;
    }

    private static void Lifetimes()
    {
        // Disposing during a run: the run ends well, then the memory goes.
        var shape = new Shape(1, 16, 2, 8, 8);
        float[] latent = Noise(shape.Elements, 5);
        var video = new float[new Shape(1, 3, 5, 64, 64).Elements];
        Vae vae = Open();
        var begun = new ManualResetEventSlim();
        var told = new Told { Then = progress => begun.Set() };
        Task run = Task.Run(() => vae.Decode(latent, shape, video, vae.Model.VideoOf(shape), new RunOptions { Progress = told }));
        begun.Wait();
        vae.Dispose();
        run.Wait();

        // A stream outlives the Vae that nobody holds any more.
        VaeStream stream = Orphan(shape);
        GC.Collect();
        GC.WaitForPendingFinalizers();
        Check.That(stream.Push<float>(latent, shape) > 0, "the stream lives");
        stream.Dispose();

        // Forgotten handles and streams are the collector's business.
        for (int i = 0; i < 50; i++)
        {
            Orphan(shape);
            if (i % 10 == 0) GC.Collect();
        }
        GC.Collect();
        GC.WaitForPendingFinalizers();
    }

    [MethodImpl(MethodImplOptions.NoInlining)]
    private static VaeStream Orphan(Shape shape)
    {
        return new Vae($"{folder}/small.safetensors", "cpu", (level, line) => { }).OpenStream("decode", shape);
    }

    /// <summary>A thousand rounds with callbacks, while the collector runs all the time.</summary>
    private static void Rounds()
    {
        const int Count = 1000, Warm = 200;
        using (var vae = new Vae($"{folder}/small.safetensors", "cpu", (level, line) => { }))
        {
            TensorLayout pixels = TensorLayout.Interleaved(1, 16, 16);
            Shape shape = vae.Model.LatentOf(pixels.Shape);
            long before = 0, calls = 0;
            byte[] first = null;
            for (int round = 0; round < Count; round++)
            {
                if (round == Warm) before = MemoryOfProcess();
                // New objects every time, so that there is something to collect, and to collect too early.
                var clip = new byte[pixels.Shape.Elements];
                for (int i = 0; i < clip.Length; i++) clip[i] = (byte)(i * 7);
                var latent = new float[shape.Elements];
                var source = new CancellationTokenSource();
                var told = new Told { Then = progress => { if (++calls % 20 == 0) GC.Collect(); } };
                var options = new RunOptions { Progress = told };
                vae.Encode(clip, pixels, latent, shape, options, source.Token);
                vae.Decode(latent, shape, clip, pixels, options, source.Token);
                first = first ?? clip;
                Check.That(((ReadOnlySpan<byte>)clip).SequenceEqual(first), "every round gives the same");
            }
            long growth = MemoryOfProcess() - before;
            Console.WriteLine($"{Count} rounds with {calls} callbacks: grew by {growth >> 10} KiB over the last {Count - Warm}");
            Check.That(growth < 8 << 20, "memory grows");
        }
    }
}
