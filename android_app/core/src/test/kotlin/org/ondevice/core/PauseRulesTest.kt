package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertFalse
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.CsvSource
import kotlin.random.Random

class PauseRulesTest {
    private fun causes(health: Health, rules: Rules = Rules(), held: Set<PauseCause> = emptySet()) =
        PauseRules.reasons(health, rules, held).map { it.cause }.toSet()

    @ParameterizedTest
    @CsvSource(
        // thermal, battery, charging, memory, held for, expected
        "0, 80, false, NONE, , ",
        "2, 80, false, NONE, , ",
        "3, 80, false, NONE, , HEAT",
        "6, 80, true, NONE, , HEAT",
        "2, 80, false, NONE, HEAT, HEAT",
        "1, 80, false, NONE, HEAT, ",
        "0, 19, false, NONE, , BATTERY",
        "0, 20, false, NONE, , ",
        "0, 20, false, NONE, BATTERY, BATTERY",
        "0, 24, false, NONE, BATTERY, BATTERY",
        "0, 25, false, NONE, BATTERY, ",
        "0, 1, true, NONE, BATTERY, ",
        "0, 80, false, MODERATE, , ",
        "0, 80, false, LOW, , MEMORY",
        "0, 80, false, CRITICAL, , MEMORY",
        "0, 80, false, MODERATE, , ",
        "0, 80, false, MODERATE, MEMORY, MEMORY",
        "0, 80, false, NONE, MEMORY, ",
        "4, 5, false, CRITICAL, , HEAT BATTERY MEMORY",
        "2, 22, false, NONE, HEAT BATTERY, HEAT BATTERY",
        "1, 22, false, NONE, HEAT BATTERY, BATTERY",
        "3, 24, false, NONE, BATTERY, HEAT BATTERY",
    )
    fun table(thermal: Int, battery: Int, charging: Boolean, memory: MemoryPressure, held: String?, expected: String?) {
        val parse = { text: String? -> text?.split(' ')?.map { PauseCause.valueOf(it) }?.toSet() ?: emptySet() }
        assertEquals(parse(expected), causes(Health(thermal, battery, charging, memory), Rules(), parse(held)))
    }

    @Test
    fun chargingOnlyDiskAndWhatIsUnknown() {
        assertEquals(setOf(PauseCause.NOT_CHARGING), causes(Health(), Rules(onlyWhileCharging = true)))
        assertEquals(emptySet<PauseCause>(), causes(Health(charging = true), Rules(onlyWhileCharging = true)))
        assertEquals(setOf(PauseCause.DISK), causes(Health(freeDiskBytes = 100), Rules(diskFloorBytes = 101)))
        assertEquals(emptySet<PauseCause>(), causes(Health(freeDiskBytes = 101), Rules(diskFloorBytes = 101)))
        assertEquals(emptySet<PauseCause>(), causes(Health(null, null, false, MemoryPressure.CRITICAL, null), Rules(pauseAtMemory = null)))
        assertEquals(emptySet<PauseCause>(), causes(Health(batteryPercent = 0), Rules(batteryFloorPercent = 0, batteryResumePercent = 0)))
    }

    /** A healthier phone never has more reasons, and being held never gives fewer. */
    @Test
    fun betterHealthNeverPausesMore() {
        val random = Random(1)
        repeat(20_000) {
            val thermal = random.nextInt(1, 7)
            val floor = random.nextInt(0, 101)
            val rules = Rules(thermal, random.nextInt(1, thermal + 1), floor, random.nextInt(floor, 101), random.nextBoolean(), MemoryPressure.values().random(random), random.nextLong(0, 1000))
            val worse = Health(random.nextInt(0, 7), random.nextInt(0, 101), random.nextBoolean(), MemoryPressure.values().random(random), random.nextLong(0, 1000))
            val better = Health(
                random.nextInt(0, worse.thermalStatus!! + 1), random.nextInt(worse.batteryPercent!!, 101), worse.charging || random.nextBoolean(),
                MemoryPressure.values()[random.nextInt(0, worse.memoryPressure.ordinal + 1)], worse.freeDiskBytes!! + random.nextLong(0, 1000),
            )
            val held = PauseCause.values().filter { random.nextBoolean() }.toSet()
            assertTrue(causes(worse, rules, held).containsAll(causes(better, rules, held)), "$rules\n$worse\n$better\n$held")
            assertTrue(causes(worse, rules, held).containsAll(causes(worse, rules)))
            assertFalse(PauseCause.USER in causes(worse, rules, held))
        }
    }

    @Test
    fun reasonsSayWhatWasMeasured() {
        val words = PauseRules.reasons(Health(4, 7, false, MemoryPressure.LOW, 5L shl 20), Rules(onlyWhileCharging = true)).map { it.words }
        assertEquals(5, words.size)
        for ((part, text) in listOf("critical", "7%", "charger", "low", "5 MiB").zip(words)) assertTrue(part in text, text)
    }

    @Test
    fun rulesThatContradictThemselvesAreRefused() {
        assertThrows(IllegalArgumentException::class.java) { Rules(pauseAtThermal = 2, resumeBelowThermal = 3) }
        assertThrows(IllegalArgumentException::class.java) { Rules(batteryFloorPercent = 101, batteryResumePercent = 101) }
        assertThrows(IllegalArgumentException::class.java) { Rules(batteryFloorPercent = 50, batteryResumePercent = 40) }
    }
}
