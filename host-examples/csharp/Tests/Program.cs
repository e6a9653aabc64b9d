// Tests of the C# wrapper:  tests FOLDER_OF_GOLDENS [NAME...]
// Runs under mono and .NET alike; tests/host_csharp.rs builds and starts it.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Linq;
using VideoVae;

internal static partial class Program
{
    private static string folder;

    private static Vae Open(string weights = "small")
    {
        return new Vae($"{folder}/{weights}.safetensors", "cpu");
    }

    private static int Main(string[] words)
    {
        folder = words[0];
        var tests = new Dictionary<string, Action>
        {
            { "layouts", Layouts.Print }, { "discovery", Discovery }, { "goldens", Goldens }, { "memory kinds", MemoryKinds },
            { "streams", Streams }, { "ranges", Ranges }, { "devices", Devices }, { "errors", Errors }, { "progress", Progress }, { "cancel", Cancel }, { "lifetimes", Lifetimes },
            { "rounds", Rounds },
        };
        int failures = 0;
        foreach (var test in tests.Where(test => words.Length == 1 || words.Contains(test.Key)))
        {
            var watch = Stopwatch.StartNew();
            try
            {
                test.Value();
                Console.WriteLine($"ok {test.Key} ({watch.ElapsedMilliseconds} ms)");
            }
            catch (Exception error)
            {
                failures++;
                Console.WriteLine($"FAILED {test.Key}: {error}");
            }
        }
        return failures == 0 ? 0 : 1;
    }

    private static float[] Noise(long count, int seed)
    {
        var random = new Random(seed);
        var values = new float[count];
        for (int i = 0; i < values.Length; i++) values[i] = (float)(random.NextDouble() * 2 - 1);
        return values;
    }
}
