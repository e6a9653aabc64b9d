using System;

/// <summary>What tests assert with.</summary>
internal static class Check
{
    public static void That(bool good, string what)
    {
        if (!good) throw new Exception(what);
    }

    public static T Throws<T>(Action body, params string[] words) where T : Exception
    {
        try
        {
            body();
        }
        catch (T error)
        {
            foreach (string word in words) That(error.Message.Contains(word), $"\"{word}\" is not in: {error.Message}");
            return error;
        }
        throw new Exception($"no {typeof(T).Name} was thrown");
    }

    /// <summary>Root mean square of the difference, relative to that of what is right.</summary>
    public static void Close(float[] found, float[] right, string what)
    {
        That(found.Length == right.Length, what);
        double difference = 0, size = 0;
        for (int i = 0; i < right.Length; i++)
        {
            difference += ((double)found[i] - right[i]) * ((double)found[i] - right[i]);
            size += (double)right[i] * right[i];
        }
        double error = Math.Sqrt(difference / size);
        That(error <= 1e-5, $"{what}: relative error {error:E2}");
    }
}
